"""Rotary position embeddings: the frequencies of each published variant."""

import math
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


def rope_from_config(config: dict, *, dims: int) -> Rope:
    """The `Rope` of a Hugging Face config (`rope_theta` and `rope_scaling`, or transformers 5's `rope_parameters`)."""
    parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(parameters.pop("rope_theta", config.get("rope_theta", 10000.0)))
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    if kind == "default":
        if parameters:
            raise UserError(f"config.json: RoPE field {sorted(parameters)[0]!r} is not understood; refusing to guess")
        return Rope(theta=theta, dims=dims)
    if kind == "llama3":
        try:
            scaling = Llama3Scaling(
                factor=float(parameters.pop("factor")),
                low_freq_factor=float(parameters.pop("low_freq_factor")),
                high_freq_factor=float(parameters.pop("high_freq_factor")),
                original_max_position=int(parameters.pop("original_max_position_embeddings")),
            )
        except KeyError as missing:
            raise UserError(f"config.json: llama3 RoPE scaling lacks {missing}") from None
        if parameters:
            raise UserError(f"config.json: RoPE field {sorted(parameters)[0]!r} is not understood; refusing to guess")
        return Rope(theta=theta, dims=dims, scaling=scaling)
    raise UserError(f"config.json: RoPE type {kind!r} is not supported (supported: default, llama3)")
