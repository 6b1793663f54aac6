"""Causal attention over a paged KV cache: the signatures, and the backends."""

import jax
import jax.numpy as jnp

from jaxwafer.ops import choice
from jaxwafer.ops.attention import cpu, gpu, reference, tpu
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step

# Tried in order. Each module has `objection(dtype, platform) -> str | None`, `description() -> str` and the operations
# below. The reference objects to nothing.
BACKENDS = {"cpu": cpu, "gpu": gpu, "tpu": tpu, "reference": reference}


def paged_attention(q: jax.Array, k: Pages, v: Pages, layer: jax.Array, step: Step, *, scale: float,
                    window: int | None = None, sinks: jax.Array | None = None, backend: str) -> jax.Array:  # fmt: skip
    """softmax(scale · q kᵀ) v over each request's own blocks, of which only live ones are read.

    q: [B, T, kv heads, queries per kv head, head_dim]; the keys and values of its T tokens are in the cache already.
    Token t of request b sees positions p = step.start[b] + t and before, of which `window` at most. sinks: float32 [kv
    heads, queries per kv head], a logit of each head that takes its share of the softmax and adds nothing. Rows that
    see nothing give 0. Returns float32, like q.
    """
    return BACKENDS[backend].paged_attention(q, k, v, layer, step, scale=scale, window=window, sinks=sinks)


def latent_attention(q: jax.Array, latent: Pages, layer: jax.Array, step: Step, *, rank: int, scale: float,
                     first: jax.Array, backend: str) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Causal attention of every head over one shared key a token, whose first `rank` elements are its value, in those
    of a request's live blocks that `latent` holds; no others are read.

    q: [B, T, heads, width], absorbed queries. latent: [.., blocks, block, 1, width], blocks `first` (int32 scalar) and
    after of those that step.table numbers. Returns float32 parts of a softmax, to be joined with those over other
    blocks: the highest score [B, T, heads] (−inf: none), the sum of exp(score − highest) [B, T, heads], and the values
    weighted by it [B, T, heads, rank].
    """
    return BACKENDS[backend].latent_attention(q, latent, layer, step, rank=rank, scale=scale, first=first)


def choose(dtype, platform: str) -> str:
    """The backend for queries of `dtype`: the first that does not object."""
    return choice.first(BACKENDS, dtype, platform)[0]


def implementation(platform: str) -> dict[str, str]:
    """{"backend", "reason"} on a platform for float32 queries."""
    return dict(zip(("backend", "reason"), choice.first(BACKENDS, jnp.float32, platform), strict=True))
