"""Rotary position embeddings: the frequencies of each published variant."""

import math
import sys
from dataclasses import dataclass

import numpy as np

from jaxwafer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotation of the first `dims` of each head, halves paired (rotate-half).

    theta: base. scaling: None, or the parameters of Llama 3.1's wavelength-dependent interpolation.
    """

    theta: float
    dims: int
    scaling: "Llama3Scaling | None" = None

    def frequencies(self) -> np.ndarray:
        """Radians per position, float32 [dims/2]."""
        exponent = np.arange(0, self.dims, 2, dtype=np.float64) / self.dims
        frequency = self.theta**-exponent
        if self.scaling is not None:
            frequency = self.scaling.apply(frequency)
        return frequency.astype(np.float32)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended linearly."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def apply(self, frequency: np.ndarray) -> np.ndarray:
        turns = self.original_max_position * frequency / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return frequency * (blend + (1 - blend) / self.factor)


def rope_from_config(config: dict, *, dims: int, partial: float | None = None) -> Rope:
    """The `Rope` of a Hugging Face config (`rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`).

    dims: of a head. partial: the default `partial_rotary_factor`; None in families that have no such field.
    """
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    parameters = config.get(field) or {}
    if not isinstance(parameters, dict):
        raise UserError(f"config.json: {field!r} should be an object, not {parameters!r}")
    # A null is as good as no field.
    parameters = {name: value for name, value in parameters.items() if value is not None}
    if "rope_theta" not in parameters:
        parameters["rope_theta"] = 10000.0 if config.get("rope_theta") is None else config["rope_theta"]
    theta = _positive(parameters, "rope_theta")
    if partial is not None:
        parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or partial)
        partial = _positive(parameters, "partial_rotary_factor")
        if partial > 1:
            raise UserError(f"config.json: 'partial_rotary_factor' must be at most 1, not {partial:g}")
        dims = int(dims * partial)
    if dims % 2:
        raise UserError(f"config.json: a head dimension {dims} is odd, and RoPE turns elements in pairs")
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    scaling = None
    if kind == "llama3":
        scaling = Llama3Scaling(
            factor=_positive(parameters, "factor"),
            low_freq_factor=_positive(parameters, "low_freq_factor"),
            high_freq_factor=_positive(parameters, "high_freq_factor"),
            original_max_position=int(_positive(parameters, "original_max_position_embeddings")),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise UserError("config.json: RoPE 'high_freq_factor' must be above 'low_freq_factor'")
    elif kind != "default":
        raise UserError(f"config.json: RoPE type {kind!r} is not supported (supported: default, llama3)")
    if parameters:
        raise UserError(f"config.json: RoPE field {sorted(parameters)[0]!r} is not understood; refusing to guess")
    return Rope(theta=theta, dims=dims, scaling=scaling)


def _positive(parameters: dict, name: str) -> float:
    """Take a field that must be a positive finite number."""
    if name not in parameters:
        raise UserError(f"config.json: RoPE lacks {name!r}")
    value = parameters.pop(name)
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise UserError(f"config.json: {name!r} should be a positive number, not {value!r}")
    return float(value)
