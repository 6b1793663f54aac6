"""What a linear mixer's operation is told: its projections, and which of the published formulas it has."""

from dataclasses import dataclass
from typing import Literal

import flax.struct
import jax

# Weights beside the products, in the order in which the CPU's kernel takes them.
VECTORS = ("q_conv", "k_conv", "v_conv", "dt_bias", "a_log", "o_norm")


@dataclass(frozen=True)
class Form:
    """key_dim, value_dim: of a head. eps: of the norm of each head's output. gate: what the gate goes through.
    lower_bound: log decay is lower_bound·σ(exp(A)·z) where it is given, otherwise −exp(A)·softplus(z)."""

    key_dim: int
    value_dim: int
    eps: float
    gate: Literal["sigmoid", "silu"]
    lower_bound: float | None = None


@flax.struct.dataclass
class Projected:
    """Products of T tokens of B requests, for the H heads of a core, of which groups of H / G share keys and queries.

    q, k: [B, T, G·K]. v: [B, T, H·V]. z: [B, T, H·K], decay of each channel (KDA), or [B, T, H], of each head (Gated
    DeltaNet). beta: [B, T, H]. gate: [B, T, H·V] in the dtype of the result. All but the gate float32.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    z: jax.Array
    beta: jax.Array
    gate: jax.Array
