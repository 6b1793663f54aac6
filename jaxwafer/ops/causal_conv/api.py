"""The causal depthwise convolution of linear mixers, which carries its past inputs: the signature, and the backends."""

import jax

from jaxwafer.ops.causal_conv import reference

BACKENDS = {"reference": reference}


def causal_conv(x: jax.Array, past: jax.Array, weight: jax.Array, count: jax.Array, *,
                backend: str) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """y_t = Σ_j weight_j ⊙ x_{t − taps + 1 + j}, with `past` before the first x: y [B, T, C], and the new past.

    x: [B, T, C], of which the first `count` (int32 [B]) tokens of each request are real. past: [B, taps − 1, C], the
    inputs before them, oldest first. weight: [C, taps], the last tap for the token itself. The new past is the last
    taps − 1 real inputs, so with a count of 0 the old one. All float32.
    """
    return BACKENDS[backend].causal_conv(x, past, weight, count)
