"""Rotary position embeddings: the frequencies of each published variant."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxwafer.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotation of the first `dims` of each head.

    theta: base. scaling: how frequencies are changed for contexts longer than those trained on first. interleaved:
    element 2i pairs with 2i + 1, as DeepSeek stores them; otherwise i pairs with i + dims/2 (rotate-half).
    """

    theta: float
    dims: int
    scaling: "Llama3Scaling | YarnScaling | LinearScaling | None" = None
    interleaved: bool = False

    def frequencies(self) -> np.ndarray:
        """Radians per position, float32 [dims/2]."""
        exponent = np.arange(0, self.dims, 2, dtype=np.float64) / self.dims
        frequency = self.theta**-exponent
        if self.scaling is not None:
            frequency = self.scaling.apply(frequency, self.theta)
        return frequency.astype(np.float32)

    @property
    def magnitude(self) -> float:
        """What rotated elements are multiplied by."""
        return getattr(self.scaling, "magnitude", 1.0)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation: every wavelength is stretched by `factor`."""

    factor: float

    def apply(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        return frequency / self.factor


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones kept, those between blended linearly."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def apply(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        turns = self.original_max_position * frequency / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return frequency * (blend + (1 - blend) / self.factor)


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): pairs that turn more than `beta_fast` times in the original context keep their
    frequency, those below `beta_slow` turns are stretched by `factor`, those between blended linearly by their index.

    truncate: the blend's ends are rounded outwards to whole indices. attention_factor: of rotated elements; None is
    derived from factor, mscale and mscale_all_dim, of which 0 is the same as not given.
    """

    factor: float
    original_max_position: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0

    def apply(self, frequency: np.ndarray, theta: float) -> np.ndarray:
        pairs = len(frequency)

        def index(turns: float) -> float:
            """Of the pair that turns so many times in the original context."""
            return pairs * math.log(self.original_max_position / (2 * math.pi * turns)) / math.log(theta)

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        # The published code bounds the upper end by the head dimension, not by the number of pairs.
        low, high = max(low, 0), min(high, 2 * pairs - 1)
        blend = np.clip((np.arange(pairs) - low) / (high - low if high != low else 0.001), 0.0, 1.0)
        return frequency * (1 - blend + blend / self.factor)

    @property
    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    @property
    def score_factor(self) -> float:
        """What multi-head latent attention multiplies its scores by: mscale² where `mscale_all_dim` is given."""
        return self._mscale(self.mscale_all_dim) ** 2

    def _mscale(self, weight: float) -> float:
        return 1.0 + 0.1 * weight * math.log(max(self.factor, 1.0))


def rope_from_config(config: dict, *, dims: int, interleaved: bool = False, partial: float | None = None) -> Rope:
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
    if theta <= 1:
        raise UserError(f"config.json: 'rope_theta' should be above 1, not {theta:g}")
    if partial is not None:
        parameters.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or partial)
        partial = _positive(parameters, "partial_rotary_factor")
        if partial > 1:
            raise UserError(f"config.json: 'partial_rotary_factor' must be at most 1, not {partial:g}")
        dims = int(dims * partial)
    if dims % 2:
        raise UserError(f"config.json: a head dimension {dims} is odd, and RoPE turns elements in pairs")
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise UserError(f"config.json: RoPE type {kind!r} is not supported (supported: {', '.join(SCALINGS)})")
    scaling = SCALINGS[kind](parameters)
    if parameters:
        raise UserError(f"config.json: RoPE field {sorted(parameters)[0]!r} is not understood; refusing to guess")
    return Rope(theta=theta, dims=dims, scaling=scaling, interleaved=interleaved)


def _llama3(parameters: dict) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=_positive(parameters, "factor"),
        low_freq_factor=_positive(parameters, "low_freq_factor"),
        high_freq_factor=_positive(parameters, "high_freq_factor"),
        original_max_position=int(_positive(parameters, "original_max_position_embeddings")),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise UserError("config.json: RoPE 'high_freq_factor' must be above 'low_freq_factor'")
    return scaling


def _yarn(parameters: dict) -> YarnScaling:
    # Zero stands for the default.
    for name in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim"):
        if type(parameters.get(name)) in (int, float) and parameters[name] == 0:
            del parameters[name]
    given = {n: _positive(parameters, n) for n in YARN_NUMBERS if n in parameters}
    truncate = parameters.pop("truncate", True)
    if not isinstance(truncate, bool):
        raise UserError(f"config.json: 'truncate' should be true or false, not {truncate!r}")
    scaling = YarnScaling(
        factor=_positive(parameters, "factor"),
        original_max_position=int(_positive(parameters, "original_max_position_embeddings")),
        truncate=truncate,
        **given,
    )
    if scaling.beta_fast < scaling.beta_slow:
        raise UserError("config.json: RoPE 'beta_fast' must not be below 'beta_slow'")
    return scaling


YARN_NUMBERS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")

# `rope_type` → the scaling, from the fields it takes
SCALINGS: dict[str, Callable[[dict], LinearScaling | Llama3Scaling | YarnScaling | None]] = {
    "default": lambda parameters: None,
    "linear": lambda parameters: LinearScaling(factor=_positive(parameters, "factor")),
    "llama3": _llama3,
    "yarn": _yarn,
}


def _positive(parameters: dict, name: str) -> float:
    """Take a field that must be a positive finite number."""
    if name not in parameters:
        raise UserError(f"config.json: RoPE lacks {name!r}")
    value = parameters.pop(name)
    if type(value) not in (int, float) or not 0 < value <= sys.float_info.max:
        raise UserError(f"config.json: {name!r} should be a positive number, not {value!r}")
    return float(value)
