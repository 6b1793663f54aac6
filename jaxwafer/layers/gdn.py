"""Gated DeltaNet on one core's heads."""

import jax

from jaxwafer.layers import linear
from jaxwafer.model.linear import GatedDeltaNet
from jaxwafer.ops.linear_attention.form import Form, Projected
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step

output = linear.output


def project(kind: GatedDeltaNet, weights: dict, layer: jax.Array, x: jax.Array, step: Step, cache: dict[str, State],
            ops: Operations):  # fmt: skip
    """Queries, keys, values, decay, β and gate for x [B, T, hidden]."""
    q, k, v, a, beta, gate = ops.project(
        x, weights["norm"], [weights[n] for n in ("q", "k", "v", "a", "b", "z")], layer, eps=kind.eps
    )
    return {"projected": Projected(q=q, k=k, v=v, z=a, beta=beta, gate=gate.astype(x.dtype))}, {}


def advance(kind: GatedDeltaNet, weights: dict, layer: jax.Array, carry: dict, cache: dict[str, State], slot: jax.Array,
            step: Step, ops: Operations) -> tuple[dict, dict[str, State]]:  # fmt: skip
    form = Form(kind.key_dim, kind.value_dim, kind.eps, gate="silu")
    return linear.advance(form, weights, layer, carry, cache, slot, step, ops)
