"""Kimi Delta Attention on one core's heads."""

import jax

from jaxwafer.layers import linear
from jaxwafer.model.linear import KDA
from jaxwafer.ops.linear_attention.form import Form, Projected
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step

output = linear.output


def project(kind: KDA, weights: dict, layer: jax.Array, x: jax.Array, step: Step, cache: dict[str, State],
            ops: Operations):  # fmt: skip
    """Queries, keys, values, decay, β and gate for x [B, T, hidden]."""
    names = ("q", "k", "v", "f_a", "b", "g" if kind.gate_rank is None else "g_a")
    flats = ops.project(x, weights["norm"], [weights[n] for n in names], layer, eps=kind.eps)
    q, k, v, low, beta, gate = flats
    z = ops.matmul(low.astype(x.dtype), weights["f_b"], layer)
    if kind.gate_rank is not None:
        gate = ops.matmul(gate.astype(x.dtype), weights["g"], layer)
    return {"projected": Projected(q=q, k=k, v=v, z=z, beta=beta, gate=gate.astype(x.dtype))}, {}


def advance(kind: KDA, weights: dict, layer: jax.Array, carry: dict, cache: dict[str, State], slot: jax.Array,
            step: Step, ops: Operations) -> tuple[dict, dict[str, State]]:  # fmt: skip
    form = Form(kind.key_dim, kind.value_dim, kind.eps, gate="sigmoid", lower_bound=kind.lower_bound)
    return linear.advance(form, weights, layer, carry, cache, slot, step, ops)
