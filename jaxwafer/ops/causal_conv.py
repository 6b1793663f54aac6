"""The causal depthwise convolution of linear mixers, which carries its past inputs: a sum of shifted inputs."""

import jax
import jax.numpy as jnp


def causal_conv(x: jax.Array, past: jax.Array, weight: jax.Array, count: jax.Array) -> tuple[jax.Array, jax.Array]:
    """y_t = Σ_j weight_j ⊙ x_{t − taps + 1 + j}, with `past` before the first x: y [B, T, C], and the new past.

    x: [B, T, C], of which the first `count` (int32 [B]) tokens of each request are real. past: [B, taps − 1, C], the
    inputs before them, oldest first. weight: [C, taps], the last tap for the token itself. The new past is the last
    taps − 1 real inputs, so with a count of 0 the old one. All float32.
    """
    tokens, taps = x.shape[1], weight.shape[1]
    inputs = jnp.concatenate([past, x], axis=1)
    y = sum(weight[:, tap][None, None] * inputs[:, tap : tap + tokens] for tap in range(taps))
    last = count[:, None] + jnp.arange(taps - 1, dtype=jnp.int32)[None]
    return y, jnp.take_along_axis(inputs, last[..., None], axis=1)
