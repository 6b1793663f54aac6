"""Gated DeltaNet on one core's heads."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.layers import linear
from jaxwafer.layers.linear import convolve, gated_norm, inputs
from jaxwafer.model.linear import GatedDeltaNet
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step

advance = linear.advance


def project(kind: GatedDeltaNet, weights: dict, layer: jax.Array, x: jax.Array, step: Step, cache: dict[str, State],
            ops: Operations):  # fmt: skip
    """The delta rule's inputs and the gate for x [B, T, hidden], and the convolutions' new state."""
    names = ("q", "k", "v", "a", "b", "z")
    flats = ops.project(x, weights["norm"], [weights[n] for n in names], layer, eps=kind.eps)
    flat = dict(zip(names, flats, strict=True))
    heads, rows = {}, {}
    for name, dim in (("q", kind.key_dim), ("k", kind.key_dim), ("v", kind.value_dim)):
        heads[name], rows[f"{name}_past"] = convolve(name, flat[name], dim, weights, layer, step, cache, ops)
    # The value heads of this core that share a key head lie beside one another.
    group = heads["v"].shape[2] // heads["k"].shape[2]
    for name in "qk":
        heads[name] = einops.repeat(heads[name], "b t h k -> b t (h group) k", group=group)
    a = flat["a"] + weights["dt_bias"][layer][None, None]
    g = -jnp.exp(weights["a_log"][layer])[None, None] * jax.nn.softplus(a)
    beta = jax.nn.sigmoid(flat["b"])
    gate = jax.nn.silu(flat["z"])
    return {"gate": gate.astype(x.dtype)} | inputs(**heads, g=g[..., None], beta=beta, step=step), rows


def output(kind: GatedDeltaNet, weights: dict, layer: jax.Array, carry: dict, ops: Operations) -> jax.Array:
    """This core's partial sum, float32 [B, T, hidden]."""
    gate = carry["gate"]
    mixed = gated_norm(carry["out"], gate, weights["o_norm"][layer], kind.eps, gate.dtype)
    return ops.matmul(mixed, weights["o"], layer)
