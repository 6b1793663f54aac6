"""Grouped-query attention on one core's heads."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.layers.rope import angles, rotate
from jaxwafer.model.attention import GQA
from jaxwafer.ops.norm import rms_norm
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step


def project(kind: GQA, weights: dict, layer: jax.Array, x: jax.Array, step: Step, cache: dict[str, Pages],
            ops: Operations):  # fmt: skip
    """Queries (and the output gate) of x [B, T, hidden], and the rows k and v, [B, T, heads, head_dim]."""
    names = ("q", "k", "v", "gate") if kind.gate else ("q", "k", "v")
    flats = ops.project(x, weights["norm"], [weights[name] for name in names], layer, eps=kind.eps)

    def heads(name: str, flat: jax.Array) -> jax.Array:
        if kind.bias:
            flat = flat + weights[f"{name}_bias"][layer][None, None]
        split = einops.rearrange(flat.astype(x.dtype), "b t (h d) -> b t h d", d=kind.head_dim)
        if kind.qk_norm and name != "v":
            split = rms_norm(split, weights[f"{name}_norm"][layer], kind.eps)
        return split

    q, k, v = (heads(name, flat) for name, flat in zip("qkv", flats[:3], strict=True))
    if kind.rope is not None:
        cos, sin = angles(kind.rope, step.positions(x.shape[1]))
        q, k = (rotate(a, cos, sin, interleaved=kind.rope.interleaved) for a in (q, k))
    carry = {"q": q}
    if kind.gate:
        carry["gate"] = jax.nn.sigmoid(flats[3])
    return carry, {"k": k, "v": v}


def attend(kind: GQA, weights: dict, layer: jax.Array, carry: dict, cache: dict[str, Pages], step: Step,
           ops: Operations) -> dict:  # fmt: skip
    """The attention of each head, in x's dtype [B, T, heads · head_dim], once k and v are in the cache."""
    q = carry["q"]
    kv_heads = cache["k"].values.shape[3]
    grouped = einops.rearrange(q, "b t (h g) d -> b t h g d", h=kv_heads)
    sinks = weights["sinks"][layer].reshape(kv_heads, -1) if kind.sinks else None
    mixed = ops.paged_attention(
        grouped, cache["k"], cache["v"], layer, step, scale=kind.head_dim**-0.5, window=kind.window, sinks=sinks
    )
    mixed = einops.rearrange(mixed, "b t h g d -> b t (h g d)")
    if kind.gate:
        mixed = mixed * carry["gate"]
    return {"mixed": mixed.astype(q.dtype)}


def output(kind: GQA, weights: dict, layer: jax.Array, carry: dict, ops: Operations) -> jax.Array:
    """This core's partial sum, float32 [B, T, hidden]."""
    partial = ops.matmul(carry["mixed"], weights["o"], layer)
    if kind.output_bias:
        # One core adds it, since the partial sums of all are added.
        first = jax.lax.axis_index("core") == 0
        partial = partial + jnp.where(first, weights["o_bias"][layer], 0.0)[None, None]
    return partial
