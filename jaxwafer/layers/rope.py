"""Rotary position embedding of queries and keys."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.model.rope import Rope


def angles(rope: Rope, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """cos and sin of every position's angles, float32 [B, T, dims/2]."""
    turn = einops.einsum(positions.astype(jnp.float32), jnp.asarray(rope.frequencies()), "b t, d -> b t d")
    return jnp.cos(turn), jnp.sin(turn)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate heads x [B, T, heads, head_dim] in float32: element i pairs with i + dims/2, the rest passes through."""
    half = cos.shape[-1]
    cos, sin = cos[:, :, None], sin[:, :, None]
    low, high, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    turned = (low * cos - high * sin, high * cos + low * sin, rest)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)
