"""Plain JAX: an online softmax over chunks of live blocks."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.ops.pages import Pages, read
from jaxwafer.ops.step import Step

# Tokens a loop step reads: enough to amortise the step, little enough not to read far past a short request.
CHUNK = 256


def supports(dtype, cache_format: str, platform: str) -> bool:
    return True


def paged_attention(q: jax.Array, k: Pages, v: Pages, layer: jax.Array, step: Step, *, scale: float,
                    window: int | None, sinks: jax.Array | None) -> jax.Array:  # fmt: skip
    per = max(1, min(CHUNK // k.block, step.table.shape[1]))
    span = per * k.block
    table = jnp.pad(step.table, ((0, 0), (0, -step.table.shape[1] % per)))
    query = step.positions(q.shape[1])
    live = (step.start + step.count)[:, None]
    batch, tokens, heads, group, dim = q.shape
    lower = jnp.full((batch, heads, group, tokens), -jnp.inf, jnp.float32)

    def chunk(i, state):
        highest, total, mixed = state
        blocks = jax.lax.dynamic_slice_in_dim(table, i * per, per, axis=1)
        position = i * span + jnp.arange(span, dtype=jnp.int32)[None]
        keys = read(k, layer, blocks, q.dtype)
        # A block can hold another request's old rows behind the live ones: masked, they must not even be multiplied by
        # zero, since they need not be finite.
        alive = (position < live)[:, :, None, None]
        values = jnp.where(alive, read(v, layer, blocks, q.dtype), jnp.zeros((), q.dtype))
        score = scale * jnp.einsum(
            "bthgd,bshd->bhgts", q, keys, preferred_element_type=jnp.float32, precision="highest"
        )
        seen = (position[:, None] <= query[:, :, None]) & (position < live)[:, None]
        if window is not None:
            seen &= position[:, None] > query[:, :, None] - window
        score = jnp.where(seen[:, None, None], score, -jnp.inf)
        top = jnp.maximum(highest, score.max(-1))
        # While a row has seen nothing its maximum is −inf, and −inf − −inf is not a number.
        base = jnp.where(jnp.isfinite(top), top, 0.0)
        weight = jnp.exp(score - base[..., None])
        keep = jnp.exp(highest - base)
        part = jnp.einsum("bhgts,bshd->bhgtd", weight.astype(q.dtype), values, preferred_element_type=jnp.float32,
                          precision="highest")  # fmt: skip
        return top, keep * total + weight.sum(-1), keep[..., None] * mixed + part

    last = (jnp.max(live) + span - 1) // span
    first = jnp.zeros_like(last)
    if window is not None:
        # What lies before every live request's window is not read.
        oldest = jnp.where(step.count > 0, step.start, jnp.iinfo(jnp.int32).max)
        first = jnp.maximum(jnp.min(oldest) - window + 1, 0) // span
    start = (lower, jnp.zeros_like(lower), jnp.zeros((*lower.shape, dim), jnp.float32))
    highest, total, mixed = jax.lax.fori_loop(first, last, chunk, start)
    if sinks is not None:
        base = jnp.where(jnp.isfinite(highest), highest, 0.0)
        total = total + jnp.where(total > 0, jnp.exp(sinks[None, :, :, None] - base), 0.0)
    out = jnp.where((total > 0)[..., None], mixed / jnp.where(total > 0, total, 1.0)[..., None], 0.0)
    return einops.rearrange(out, "b h g t d -> b t h g d")
