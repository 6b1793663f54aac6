"""Grouped-query attention on one core's heads."""

import einops
import jax

from jaxwafer.layers.norm import rms_norm
from jaxwafer.layers.rope import angles, rotate
from jaxwafer.model.kinds import GQA
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step


def project(kind: GQA, weights: dict, layer: jax.Array, x: jax.Array, step: Step,
            ops: Operations) -> tuple[jax.Array, dict[str, jax.Array]]:  # fmt: skip
    """Queries [B, T, heads, head_dim] of x [B, T, hidden], and the rows that go into the cache: k and v."""
    heads = "b t (h d) -> b t h d"
    normed = rms_norm(x, weights["norm"][layer], kind.eps)
    q, k, v = (ops.matmul(normed, weights[name], layer).astype(x.dtype) for name in ("q", "k", "v"))
    cos, sin = angles(kind.rope, step.positions(x.shape[1]))
    q = rotate(einops.rearrange(q, heads, d=kind.head_dim), cos, sin)
    k = rotate(einops.rearrange(k, heads, d=kind.head_dim), cos, sin)
    return q, {"k": k, "v": einops.rearrange(v, heads, d=kind.head_dim)}


def attend(kind: GQA, weights: dict, layer: jax.Array, q: jax.Array, cache: dict[str, Pages], step: Step,
           ops: Operations) -> jax.Array:  # fmt: skip
    """This core's partial sum of the attention's output, float32 [B, T, hidden], once k and v are in the cache."""
    grouped = einops.rearrange(q, "b t (h g) d -> b t h g d", h=cache["k"].values.shape[3])
    mixed = ops.paged_attention(grouped, cache["k"], cache["v"], layer, step, scale=kind.head_dim**-0.5)
    return ops.matmul(einops.rearrange(mixed, "b t h g d -> b t (h g d)").astype(q.dtype), weights["o"], layer)
