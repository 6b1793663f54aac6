"""Grouped-query attention on one core's heads."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.ops.pages import Pages, append
from jaxwafer.layers.norm import rms_norm
from jaxwafer.layers.rope import angles, rotate
from jaxwafer.ops.step import Step
from jaxwafer.model.kinds import GQA
from jaxwafer.ops.operations import Operations


def gqa(kind: GQA, weights: dict, layer: jax.Array, x: jax.Array, step: Step, cache: dict[str, Pages],
        ops: Operations) -> tuple[jax.Array, dict[str, Pages]]:  # fmt: skip
    """Attention of x [B, T, hidden] in layer `layer` of the stack: this core's partial sum, float32, and the cache."""
    heads = "b t (h d) -> b t h d"
    normed = rms_norm(x, weights["norm"][layer], kind.eps)
    q, k, v = (ops.matmul(normed, weights[name], layer).astype(x.dtype) for name in ("q", "k", "v"))
    cos, sin = angles(kind.rope, step.positions(x.shape[1]))
    q = rotate(einops.rearrange(q, heads, d=kind.head_dim), cos, sin)
    k = rotate(einops.rearrange(k, heads, d=kind.head_dim), cos, sin)
    v = einops.rearrange(v, heads, d=kind.head_dim)

    block, offset = step.rows(x.shape[1], cache["k"].block, cache["k"].blocks)
    cache = {
        "k": append(cache["k"], layer, block, offset, k),
        "v": append(cache["v"], layer, block, offset, v),
    }
    q = einops.rearrange(q, "b t (h g) d -> b t h g d", h=k.shape[2])
    mixed = ops.paged_attention(q, cache["k"], cache["v"], layer, step, scale=kind.head_dim**-0.5)
    mixed = einops.rearrange(mixed, "b t h g d -> b t (h g d)").astype(x.dtype)
    return ops.matmul(mixed, weights["o"], layer), cache


