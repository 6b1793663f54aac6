"""Several processes, each with devices of its own, that run one program over one mesh (`jax.distributed`).

Every process takes the same requests through the same steps, and so comes to the same decisions; what depends on a
clock is decided by process 0. What the host reads is replicated on the devices first.
"""

import contextlib
import sys
from dataclasses import dataclass

import jax
import numpy as np

# Public functions say how many processes there are only once there are devices, and those of CPUs are set up by it.
from jax._src.distributed import global_state
from jax.experimental import multihost_utils

from jaxwafer.errors import ProcessLost, UserError

# A process whose heartbeats stop for as many seconds is taken for dead.
HEARTBEAT_SECONDS = 30


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Who takes part. coordinator: HOST:PORT of process 0. processes: how many; process: which of them this is. All
    None: as the environment of Slurm, Open MPI, Kubernetes or Cloud TPU has it. timeout: seconds to wait for the
    others, at the start and at the end, and at most until one that died is missed."""

    coordinator: str | None = None
    processes: int | None = None
    process: int | None = None
    timeout: int = 300

    def __post_init__(self):
        given = [x is not None for x in (self.coordinator, self.processes, self.process)]
        if any(given) != all(given):
            raise UserError("--coordinator, --processes and --process belong together: give all three or none")
        if self.timeout < 1:
            raise UserError(f"--timeout must be at least 1 second, not {self.timeout}")
        if all(given):
            host, _, port = self.coordinator.rpartition(":")
            if not host or not port.isdecimal() or not 0 < int(port) < 65536:
                raise UserError(f"--coordinator should be HOST:PORT, not {self.coordinator!r}")
            if not 0 <= self.process < self.processes:
                raise UserError(f"--process must be from 0 to {self.processes - 1} of --processes {self.processes}, "
                                f"not {self.process}")  # fmt: skip


def join(cluster: Cluster) -> None:
    """Meet the other processes, before JAX has looked at any device."""
    # It would have SIGTERM only noted, and the process go on.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            cluster.coordinator, cluster.processes, cluster.process,
            cluster_detection_method="deactivate" if cluster.coordinator else None,
            initialization_timeout=cluster.timeout, heartbeat_timeout_seconds=min(cluster.timeout, HEARTBEAT_SECONDS),
            shutdown_timeout_seconds=cluster.timeout,
        )  # fmt: skip
    except ValueError:
        raise UserError(
            "--distributed finds no Slurm, Open MPI, Kubernetes or Cloud TPU in the environment: give --coordinator "
            "HOST:PORT, --processes N and --process I"
        ) from None
    except (RuntimeError, OSError) as error:
        reason = next((x for x in str(error).splitlines() if x.strip()), "no reason given")
        raise UserError(f"cannot join the other processes: {reason}") from None


def processes() -> int:
    """How many there are. Asks no device, so that virtual ones may still be set up."""
    return global_state.num_processes


def leads() -> bool:
    """Whether this is process 0, which alone prints and writes."""
    return global_state.process_id == 0


def from_leader(value: float) -> float:
    """What process 0 has for a number that the processes may differ in."""
    if processes() == 1:
        return value
    return float(multihost_utils.broadcast_one_to_all(np.float64(value)))


@contextlib.contextmanager
def only_leader_prints():
    """Nothing reaches stdout from the other processes."""
    with contextlib.ExitStack() as stack:
        if not leads():
            stack.enter_context(contextlib.redirect_stdout(stack.enter_context(open("/dev/null", "w"))))
        yield


@contextlib.contextmanager
def partners():
    """What a device call says when another process is gone becomes a `ProcessLost`."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            raise
        reason = " ".join(str(error).split())
        raise ProcessLost(f"another process of the run died or stopped answering ({reason:.200})") from error


def leave() -> None:
    """Wait for the others to be done, so that none is missed by one that still works."""
    sys.stdout.flush()
    jax.distributed.shutdown()
