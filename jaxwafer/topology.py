"""Devices that are only described: TPU topologies that programs can be compiled for on any machine."""

import contextlib
import math
import os
import re
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh

from jaxwafer.errors import UserError
from jaxwafer.hardware import read_hardware
from jaxwafer.mesh import MeshShape

# The generation in a topology's name → the file in meshes/ that describes its chip.
CHIPS = {"v4": "tpu-v4", "v5e": "tpu-v5e", "v5p": "tpu-v5p", "v6e": "tpu-v6e", "tpu7x": "tpu7x"}
EXAMPLES = "v4:2x2x4, v5e:4x4, v5p:2x2x4, v6e:4x4, tpu7x:2x2x4"


@dataclass(frozen=True)
class Target:
    """A mesh of described devices. memory_bytes: of each."""

    name: str
    mesh: Mesh
    memory_bytes: float

    @property
    def kind(self) -> str:
        return self.mesh.devices.flat[0].device_kind


def tpu_target(name: str, shape: MeshShape) -> Target:
    """Wafers × cores over the first devices of a TPU topology such as "v5e:4x4", in the order libtpu lists them.

    An unknown topology, one with too few devices and a machine without libtpu are UserErrors.
    """
    match = re.fullmatch(rf"({'|'.join(CHIPS)}):(\d+(?:x\d+)+)", name)
    if not match:
        raise UserError(f"--target {name!r} is no TPU topology; give one such as {EXAMPLES}")
    devices = _describe(name)
    if shape.devices > len(devices):
        raise UserError(f"mesh {shape} needs {shape.devices} devices, but {name} has {len(devices)}")
    grid = np.array(devices[: shape.devices]).reshape(shape.wafers, shape.cores)
    mesh = Mesh(grid, ("wafer", "core"))
    assert (mesh.devices == grid).all(), "JAX reordered the devices"
    # JAX shows a chip of some generations as two devices.
    chips = math.prod(map(int, match[2].split("x")))
    return Target(name, mesh, read_hardware(CHIPS[match[1]]).hardware.memory_bytes * chips / len(devices))


def _describe(name: str) -> list:
    # Otherwise libtpu asks a cloud's metadata server what machine this is.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", name.replace(":", "-").split("x")[0])
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
