"""Gated DeltaNet on one core's heads."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.layers.linear import convolve, gated_norm, recur
from jaxwafer.layers.norm import rms_norm
from jaxwafer.model.linear import GatedDeltaNet
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step


def project(kind: GatedDeltaNet, weights: dict, layer: jax.Array, x: jax.Array, step: Step, cache: dict[str, State],
            ops: Operations):  # fmt: skip
    """Each head's output and gate for x [B, T, hidden], and the request's new state."""
    normed = rms_norm(x, weights["norm"][layer], kind.eps)
    heads, rows = {}, {}
    for name, dim in (("q", kind.key_dim), ("k", kind.key_dim), ("v", kind.value_dim)):
        flat = ops.matmul(normed, weights[name], layer)
        heads[name], rows[f"{name}_past"] = convolve(name, flat, dim, weights, layer, step, cache, ops)
    # The value heads of this core that share a key head lie beside one another.
    group = heads["v"].shape[2] // heads["k"].shape[2]
    for name in "qk":
        heads[name] = einops.repeat(heads[name], "b t h k -> b t (h group) k", group=group)
    a = ops.matmul(normed, weights["a"], layer) + weights["dt_bias"][layer][None, None]
    g = -jnp.exp(weights["a_log"][layer])[None, None] * jax.nn.softplus(a)
    beta = jax.nn.sigmoid(ops.matmul(normed, weights["b"], layer))
    out, rows["state"] = recur(**heads, g=g[..., None], beta=beta, layer=layer, step=step, cache=cache, ops=ops)
    gate = jax.nn.silu(ops.matmul(normed, weights["z"], layer))
    return {"out": out, "gate": gate.astype(x.dtype)}, rows


def output(kind: GatedDeltaNet, weights: dict, layer: jax.Array, carry: dict, ops: Operations) -> jax.Array:
    """This core's partial sum, float32 [B, T, hidden]."""
    gate = carry["gate"]
    mixed = gated_norm(carry["out"], gate, weights["o_norm"][layer], kind.eps, gate.dtype)
    return ops.matmul(mixed, weights["o"], layer)
