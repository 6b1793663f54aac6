"""Kimi Delta Attention on one core's heads."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.layers import linear
from jaxwafer.layers.linear import convolve, gated_norm, inputs
from jaxwafer.model.linear import KDA
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step

advance = linear.advance


def project(kind: KDA, weights: dict, layer: jax.Array, x: jax.Array, step: Step, cache: dict[str, State],
            ops: Operations):  # fmt: skip
    """The delta rule's inputs and the gate for x [B, T, hidden], and the convolutions' new state."""
    names = ("q", "k", "v", "f_a", "b", "g" if kind.gate_rank is None else "g_a")
    flats = ops.project(x, weights["norm"], [weights[n] for n in names], layer, eps=kind.eps)
    flat = dict(zip(names, flats, strict=True))
    heads, rows = {}, {}
    for name, dim in (("q", kind.key_dim), ("k", kind.key_dim), ("v", kind.value_dim)):
        heads[name], rows[f"{name}_past"] = convolve(name, flat[name], dim, weights, layer, step, cache, ops)
    z = ops.matmul(flat["f_a"].astype(x.dtype), weights["f_b"], layer) + weights["dt_bias"][layer][None, None]
    g = log_decay(kind, einops.rearrange(z, "b t (h k) -> b t h k", k=kind.key_dim), weights["a_log"][layer])
    beta = jax.nn.sigmoid(flat["b"])
    gate = flat[names[-1]]
    if kind.gate_rank is not None:
        gate = ops.matmul(gate.astype(x.dtype), weights["g"], layer)
    gate = jax.nn.sigmoid(gate)
    return {"gate": gate.astype(x.dtype)} | inputs(**heads, g=g, beta=beta, step=step), rows


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
