"""Causal attention over a paged KV cache: the signature, and the backends."""

import jax

from jaxwafer.ops.attention import reference
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step

BACKENDS = {"reference": reference}


def paged_attention(q: jax.Array, k: Pages, v: Pages, layer: jax.Array, step: Step, *, scale: float,
                    window: int | None = None, sinks: jax.Array | None = None, backend: str) -> jax.Array:  # fmt: skip
    """softmax(scale · q kᵀ) v over each request's own blocks, of which only live ones are read.

    q: [B, T, kv heads, queries per kv head, head_dim]; the keys and values of its T tokens are in the cache already.
    Token t of request b sees positions p = step.start[b] + t and before, of which `window` at most. sinks: float32 [kv
    heads, queries per kv head], a logit of each head that takes its share of the softmax and adds nothing. Rows that
    see nothing give 0. Returns float32, like q.
    """
    return BACKENDS[backend].paged_attention(q, k, v, layer, step, scale=scale, window=window, sinks=sinks)
