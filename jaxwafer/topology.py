"""Devices that are only described: TPU topologies that programs can be compiled for on any machine, and meshes of GPUs
or CPUs that they can be lowered for."""

import contextlib
import math
import re
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh

from jaxwafer.errors import UserError
from jaxwafer.hardware import read_hardware
from jaxwafer.mesh import MeshShape, describe_host_to_libtpu

# The generation in a topology's name → the file in meshes/ that describes its chip, and the devices that a chip is.
CHIPS = {
    "v4": ("tpu-v4", 2), "v5e": ("tpu-v5e", 1), "v5p": ("tpu-v5p", 1), "v6e": ("tpu-v6e", 1), "tpu7x": ("tpu7x", 2),
}  # fmt: skip
EXAMPLES = "v4:2x2x4, v5e:4x4, v5p:2x2x4, v6e:4x4, tpu7x:2x2x4"
TPU_NAME = re.compile(rf"({'|'.join(CHIPS)}):([1-9][0-9]*(?:x[1-9][0-9]*)+)")
# Platforms that are not compiled for, as `jax.export` names them → the platform and the kind that a device says it has.
# Triton wants to know of a GPU what it can; what it makes for this one is in the module as source still.
PLATFORMS = {"cuda": ("gpu", "NVIDIA H200"), "cpu": ("cpu", "cpu")}


@dataclass(frozen=True)
class Target:
    """A mesh of described devices. memory_bytes: of each."""

    name: str
    mesh: Mesh
    memory_bytes: float

    @property
    def kind(self) -> str:
        return self.mesh.devices.flat[0].device_kind


def check_target(name: str, shape: MeshShape) -> None:
    """Refuse names that are neither a TPU topology nor in `PLATFORMS`, and topologies too small for a mesh, as
    UserErrors; libtpu is not asked."""
    if name in PLATFORMS:
        return
    match = TPU_NAME.fullmatch(name)
    if not match:
        raise UserError(
            f"--target {name!r} is neither a TPU topology, such as {EXAMPLES}, nor one of {', '.join(PLATFORMS)}"
        )
    devices = _chips(match) * CHIPS[match[1]][1]
    if shape.devices > devices:
        raise UserError(f"mesh {shape} needs {shape.devices} devices, but {name} has {devices}")
    if devices % shape.devices:
        # XLA's compiler for TPUs ends the process over sums of groups that do not.
        raise UserError(f"mesh {shape} has {shape.devices} devices, which do not divide the {devices} of {name}")


def tpu_target(name: str, shape: MeshShape) -> Target:
    """Wafers × cores over the first devices of a TPU topology such as "v5e:4x4", in the order libtpu lists them.

    What `check_target` refuses, a topology that libtpu does not have and a machine without libtpu are UserErrors.
    """
    check_target(name, shape)
    match = TPU_NAME.fullmatch(name)
    devices = _describe(name)
    chip, each = CHIPS[match[1]]
    assert len(devices) == _chips(match) * each, f"{name} has {len(devices)} devices"
    grid = np.array(devices[: shape.devices]).reshape(shape.wafers, shape.cores)
    mesh = Mesh(grid, ("wafer", "core"))
    assert (mesh.devices == grid).all(), "JAX reordered the devices"
    return Target(name, mesh, read_hardware(chip).hardware.memory_bytes / each)


def abstract_mesh(name: str, shape: MeshShape) -> AbstractMesh:
    """Wafers × cores of a platform in `PLATFORMS`, of which there need be no device."""
    # The machine's own devices, TPUs above all, are not to be woken for this.
    jax.config.update("jax_platforms", "cpu")
    platform, kind = PLATFORMS[name]
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    axes = ("wafer", "core")
    return AbstractMesh((shape.wafers, shape.cores), axes, (AxisType.Auto,) * len(axes), abstract_device=device)


def _chips(match: re.Match) -> int:
    return math.prod(map(int, match[2].split("x")))


def _describe(name: str) -> list:
    describe_host_to_libtpu(name.replace(":", "-").split("x")[0])
    with contextlib.suppress(ImportError):
        import libtpu  # noqa: F401

        jax.config.update("jax_platforms", "cpu")
        from jax.experimental import topologies

        try:
            return list(topologies.get_topology_desc(platform="tpu", topology_name=name).devices)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise UserError(f"libtpu has no topology {name}: {reason}; give one such as {EXAMPLES}") from None
    raise UserError("compiling for a TPU needs libtpu: pip install 'jaxwafer[tpu]'")
