"""What a device can do, from a TOML file in `meshes/`: every figure with its source and date.

A device is what one JAX device is: a chip, or a whole wafer. Rates are bytes/s and FLOP/s (dense), times seconds,
memory bytes, power watts. A figure that is missing or not positive, and one without a source, is a UserError.
"""

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from jaxwafer.data_dir import data_folder
from jaxwafer.errors import UserError, reason

Positive = Annotated[float, msgspec.Meta(gt=0, lt=1e30)]
Natural = Annotated[float, msgspec.Meta(ge=0, lt=1e30)]
Count = Annotated[int, msgspec.Meta(ge=1)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]


class Fabric(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The network of the cores on a wafer, on which a layer may have a region of its own.

    cores: of the wafer. hop_s: to the next core. collectives: sums over its region that a layer takes, each 2√P hops.
    """

    cores: Count
    hop_s: Positive
    collectives: Count


class Constants(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Corrections to the figures, assumed or fitted to measured rows (`jaxwafer calibrate`).

    bandwidth_efficiency, compute_efficiency, link_efficiency: reached share of the rates. collective_s: of one sum over
    the devices of a stage, beside its bytes. layer_s: of each layer, whatever it does. overhead: factor on everything.
    basis: what they rest on. date: of the fit. left_out_error: mean relative error on rows left out of the fit.
    """

    basis: str
    date: str
    bandwidth_efficiency: Share = 1.0
    compute_efficiency: Share = 1.0
    link_efficiency: Share = 1.0
    collective_s: Natural = 0.0
    layer_s: Natural = 0.0
    overhead: Annotated[float, msgspec.Meta(ge=1)] = 1.0
    left_out_error: Natural | None = None


class Hardware(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One device.

    kind: "wafer", "tpu", "gpu", "lpu" or "cpu". flops: number format of the arithmetic → FLOP/s. hop_s,
    hop_bytes_per_s: from a stage to the next. core_bytes_per_s: at which a device sends in a sum over its stage.
    domain: devices that fast links join, the widest stage that is tried. external_bytes, external_bytes_per_s: memory
    outside the device from which layers can be streamed, and its rate; None if there is none. power_w, usd_per_hour: of
    a device, None if unknown.
    """

    name: str
    kind: str
    memory_bytes: Positive
    memory_bytes_per_s: Positive
    flops: dict[str, Positive]
    hop_s: Natural
    hop_bytes_per_s: Positive
    core_bytes_per_s: Positive
    domain: Count
    external_bytes: Positive | None = None
    external_bytes_per_s: Positive | None = None
    power_w: Positive | None = None
    usd_per_hour: Positive | None = None
    fabric: Fabric | None = None

    def flops_per_s(self, compute: str) -> float:
        if compute not in self.flops:
            raise UserError(f"{self.name} has no rate for {compute} arithmetic; choose one of {', '.join(self.flops)}")
        return self.flops[compute]


class Description(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A hardware file. sources: figure ("flops.bf16", "fabric.cores") → where it is from, and when."""

    hardware: Hardware
    sources: dict[str, str]
    constants: Constants


def hardware_names() -> list[str]:
    """The files of `meshes/` that describe hardware."""
    return sorted(p.stem for p in data_folder("meshes").glob("*.toml") if "hardware" in tomllib.loads(p.read_text()))


def read_hardware(name: str) -> Description:
    """The description in a TOML file, or in the one of that name in `meshes/`."""
    for path in (Path(name), data_folder("meshes") / f"{name}.toml"):
        if path.suffix == ".toml" and path.is_file():
            return _read(path)
    raise UserError(
        f"there is no hardware {name!r}; give a TOML file, this-machine or one of: {', '.join(hardware_names())}"
    )


def _read(path: Path) -> Description:
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Description)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} does not describe hardware: {reason(error)}") from None
    for figure in figures(found.hardware):
        if not found.sources.get(figure, "").strip():
            raise UserError(f"{path}: the figure {figure!r} has no source in [sources]")
    return found


def figures(hardware: Hardware) -> list[str]:
    """Names of the figures that are given, which need a source each."""
    given = []
    for name, value in msgspec.to_builtins(hardware).items():
        if isinstance(value, dict):
            given += [f"{name}.{part}" for part in value]
        elif value is not None and name not in ("name", "kind"):
            given.append(name)
    return given
