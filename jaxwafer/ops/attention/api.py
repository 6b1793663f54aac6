"""Causal attention over a paged KV cache: the signature, and the backends."""

import jax

from jaxwafer.ops.attention import reference
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step

BACKENDS = {"reference": reference}


def paged_attention(q: jax.Array, k: Pages, v: Pages, layer: jax.Array, step: Step, *, scale: float,
                    backend: str) -> jax.Array:  # fmt: skip
    """softmax(scale · q kᵀ) v over each request's own blocks, of which only live ones are read.

    q: [B, T, kv heads, queries per kv head, head_dim]; the keys and values of its T tokens are in the cache already.
    Token t of request b sees positions ≤ step.start[b] + t. Rows that see nothing give 0. Returns float32, like q.
    """
    return BACKENDS[backend].paged_attention(q, k, v, layer, step, scale=scale)
