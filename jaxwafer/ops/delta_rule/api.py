"""The gated delta rule, the recurrence of KDA and Gated DeltaNet: the signature, and the backends."""

import jax

from jaxwafer.ops.delta_rule import reference

BACKENDS = {"reference": reference}


def delta_rule(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: jax.Array, *,
               backend: str) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """o [B, T, H, V] of T tokens and the state after them, [B, H, K, V]; all float32.

    For each token and head, with S the state as a matrix [K, V] (Kimi Linear, arXiv 2510.26692, eq. 1):

        S ← diag(exp g) S;  S ← S + k ⊗ β(v − Sᵀk);  o = Sᵀq

    q, k: [B, T, H, K]. v: [B, T, H, V]. g: log decay ≤ 0, a channel [B, T, H, K] (KDA) or a head [B, T, H, 1] (Gated
    DeltaNet). beta: [B, T, H]. A token with g = 0 and β = 0 leaves the state exactly as it is, if its k and v are
    finite. T = 1 takes one step; more tokens are taken in chunks, with the same result to rounding.
    """
    return BACKENDS[backend].delta_rule(q, k, v, g, beta, state)
