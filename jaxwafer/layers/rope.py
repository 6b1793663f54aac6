"""Rotary position embedding of queries and keys."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.model.rope import Rope


def angles(rope: Rope, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position's angles, times the variant's magnitude, float32 [B, T, dims/2]."""
    turn = einops.einsum(positions.astype(jnp.float32), jnp.asarray(rope.frequencies()), "b t, d -> b t d")
    return rope.magnitude * jnp.cos(turn), rope.magnitude * jnp.sin(turn)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, *, interleaved: bool = False) -> jax.Array:
    """Rotate heads x [B, T, heads, head_dim] in float32: element i pairs with i + dims/2, or 2i with 2i + 1 where
    interleaved; what lies beyond dims passes through."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    turning, rest = jnp.split(x.astype(jnp.float32), (2 * half,), axis=-1)
    order = "(pair two)" if interleaved else "(two pair)"
    low, high = einops.rearrange(turning, f"b t h {order} -> two b t h pair", two=2)
    turned = jnp.stack([low * cos - high * sin, high * cos + low * sin])
    turned = einops.rearrange(turned, f"two b t h pair -> b t h {order}")
    return jnp.concatenate([turned, rest], axis=-1).astype(x.dtype)
