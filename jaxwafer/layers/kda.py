"""Kimi Delta Attention on one core's heads."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.layers.linear import convolve, gated_norm, recur
from jaxwafer.layers.norm import rms_norm
from jaxwafer.model.linear import KDA
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step


def project(kind: KDA, weights: dict, layer: jax.Array, x: jax.Array, step: Step, cache: dict[str, State],
            ops: Operations):  # fmt: skip
    """Each head's output and gate for x [B, T, hidden], and the request's new state."""
    normed = rms_norm(x, weights["norm"][layer], kind.eps)
    heads, rows = {}, {}
    for name, dim in (("q", kind.key_dim), ("k", kind.key_dim), ("v", kind.value_dim)):
        flat = ops.matmul(normed, weights[name], layer)
        heads[name], rows[f"{name}_past"] = convolve(name, flat, dim, weights, layer, step, cache, ops)
    low = ops.matmul(normed, weights["f_a"], layer).astype(x.dtype)
    z = ops.matmul(low, weights["f_b"], layer) + weights["dt_bias"][layer][None, None]
    g = log_decay(kind, einops.rearrange(z, "b t (h k) -> b t h k", k=kind.key_dim), weights["a_log"][layer])
    beta = jax.nn.sigmoid(ops.matmul(normed, weights["b"], layer))
    out, rows["state"] = recur(**heads, g=g, beta=beta, layer=layer, step=step, cache=cache, ops=ops)
    if kind.gate_rank is not None:
        normed = ops.matmul(normed, weights["g_a"], layer).astype(x.dtype)
    gate = jax.nn.sigmoid(ops.matmul(normed, weights["g"], layer))
    return {"out": out, "gate": gate.astype(x.dtype)}, rows


def log_decay(kind: KDA, z: jax.Array, a_log: jax.Array) -> jax.Array:
    """g ≤ 0 of z [B, T, H, K] with a_log [1, 1, H, 1]."""
    rate = jnp.exp(a_log)
    if kind.lower_bound is not None:
        return kind.lower_bound * jax.nn.sigmoid(rate * z)
    return -rate * jax.nn.softplus(z)


def output(kind: KDA, weights: dict, layer: jax.Array, carry: dict, ops: Operations) -> jax.Array:
    """This core's partial sum, float32 [B, T, hidden]."""
    gate = carry["gate"]
    mixed = gated_norm(carry["out"], gate, weights["o_norm"][layer], kind.eps, gate.dtype)
    return ops.matmul(mixed, weights["o"], layer)
