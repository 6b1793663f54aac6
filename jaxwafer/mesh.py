"""Relabel devices as wafers × cores."""

import contextlib
import os
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from jaxwafer import distributed
from jaxwafer.data_dir import data_folder
from jaxwafer.errors import UserError

# Virtual CPU devices are threads; more than this only measures the scheduler.
MAX_VIRTUAL = 256


@dataclass(frozen=True)
class MeshShape:
    """wafers: pipeline stages. cores: shards within a stage. platform: None for whatever JAX finds first."""

    wafers: int
    cores: int
    platform: str | None = None

    @property
    def devices(self) -> int:
        return self.wafers * self.cores

    def __str__(self) -> str:
        return f"{self.wafers}x{self.cores}"


def parse_mesh(text: str) -> MeshShape:
    """`WxC` (wafers × cores), a TOML file, or the name of one in `meshes/`."""
    if match := re.fullmatch(r"(-?[0-9]{1,9})x(-?[0-9]{1,9})", text.strip()):
        wafers, cores = map(int, match.groups())
        return _checked(wafers, cores, None, f"--mesh {text}")
    meshes = data_folder("meshes")
    for path in (Path(text), meshes / f"{text}.toml"):
        if path.suffix == ".toml" and path.is_file():
            return _read(path)
    # The folder's other files describe hardware.
    known = ", ".join(sorted(p.stem for p in meshes.glob("*.toml") if "mesh" in tomllib.loads(p.read_text())))
    raise UserError(f"--mesh {text!r} is neither WxC (wafers x cores, such as 4x2), a TOML file nor one of: {known}")


def _read(path: Path) -> MeshShape:
    try:
        fields = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not a TOML file that can be read: {error}") from None
    mesh = fields.get("mesh")
    if not isinstance(mesh, dict):
        raise UserError(f"{path}: has no [mesh] table with wafers and cores")
    wafers, cores = mesh.get("wafers"), mesh.get("cores")
    if type(wafers) is not int or type(cores) is not int:
        raise UserError(f"{path}: [mesh] wafers and cores must be whole numbers")
    platform = mesh.get("platform")
    if not isinstance(platform, str | None):
        raise UserError(f'{path}: [mesh] platform must be a text, such as "cpu"')
    return _checked(wafers, cores, platform, str(path))


def _checked(wafers: int, cores: int, platform: str | None, where: str) -> MeshShape:
    if wafers < 1 or cores < 1:
        raise UserError(f"{where}: wafers and cores must be at least 1")
    return MeshShape(wafers, cores, platform)


def make_mesh(shape: MeshShape) -> Mesh:
    """A JAX mesh with axes "wafer" and "core" over the first devices, in the order JAX gives them.

    On a CPU virtual devices are set up here, if JAX has not been used in this process yet. Of several processes each
    has an equal share of them; one that has none in the mesh is a UserError.
    """
    if shape.devices <= MAX_VIRTUAL:
        _virtual_cpus(-(-shape.devices // distributed.processes()))
    devices = find_devices(shape.platform)
    if shape.devices > len(devices):
        kind = devices[0].platform
        limit = f" (at most {MAX_VIRTUAL} virtual ones)" if kind == "cpu" else ""
        raise UserError(
            f"mesh {shape} needs {shape.devices} devices, but there are {len(devices)} {kind} devices{limit}"
        )
    grid = np.array(devices[: shape.devices]).reshape(shape.wafers, shape.cores)
    mesh = Mesh(grid, ("wafer", "core"))
    assert (mesh.devices == grid).all(), "JAX reordered the devices"
    if idle := set(range(distributed.processes())) - {d.process_index for d in grid.flat}:
        raise UserError(
            f"mesh {shape} leaves process {min(idle)} of {distributed.processes()} without a device: use a larger mesh "
            "or fewer processes"
        )
    return mesh


def reserve(meshes: Iterable[MeshShape]) -> None:
    """Set up the devices of the largest of several meshes, since virtual ones are set up once in a process."""
    make_mesh(max(meshes, key=lambda shape: shape.devices))


def find_devices(platform: str | None = None) -> list:
    """The devices of a platform, which becomes JAX's default; of the default one for None."""
    before = jax.config.jax_platforms
    if before is None:
        # Where there are TPUs, JAX has said so by now; elsewhere an installed libtpu has only complaints to print.
        describe_host_to_libtpu("v5e-1")
    try:
        if platform is None:
            return jax.devices()
        jax.config.update("jax_platforms", platform)
        return jax.devices(platform)
    except RuntimeError as error:
        jax.config.update("jax_platforms", before)
        reason = str(error).splitlines()[0]
        if platform is None:
            raise UserError(f"JAX finds no devices here: {reason}") from None
        raise UserError(f"the mesh asks for {platform!r}, but JAX has no {platform} devices here: {reason}") from None


def describe_host_to_libtpu(accelerator: str) -> None:
    """For a machine without TPUs: what libtpu would otherwise ask a cloud's metadata server about, for example an
    accelerator "v5e-4". Nor does it lock out other processes, since none of them takes a TPU here."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", accelerator)


def device_memory(mesh: Mesh) -> int | None:
    """Bytes that each device of a mesh has; virtual ones share the host's. None where the platform does not say."""
    device = mesh.local_devices[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(mesh.local_devices)
    return (device.memory_stats() or {}).get("bytes_limit")


def _virtual_cpus(count: int) -> None:
    """Ask for `count` CPU devices. JAX refuses once it has been used; then the devices are what they are."""
    if count > jax.config.jax_num_cpu_devices:
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_num_cpu_devices", count)
