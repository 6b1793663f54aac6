"""What the linear-attention mixers share: from projections to the output's product, with the state in the cache."""

import jax

from jaxwafer.ops.linear_attention.form import VECTORS, Form
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step


def advance(form: Form, weights: dict, layer: jax.Array, carry: dict, cache: dict[str, State], slot: jax.Array,
            step: Step, ops: Operations) -> tuple[dict, dict[str, State]]:  # fmt: skip
    """From and to each request's state in the cache, at `slot`, where that is not negative."""
    own = {name: weights[name] for name in VECTORS}
    out, cache = ops.linear_attention(carry["projected"], own, layer, cache, layer, slot, step, form)
    return {"out": out}, cache


def output(kind, weights: dict, layer: jax.Array, carry: dict, ops: Operations) -> jax.Array:
    """This core's partial sum, float32 [B, T, hidden]."""
    return ops.matmul(carry["out"], weights["o"], layer)
