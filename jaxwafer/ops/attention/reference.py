"""Plain JAX: an online softmax over chunks of live blocks."""

from collections.abc import Callable

import einops
import jax
import jax.numpy as jnp

from jaxwafer.ops.pages import Pages, read
from jaxwafer.ops.step import Step

# Tokens a loop step reads: enough to amortise the step, little enough not to read far past a short request.
CHUNK = 256
NEVER = jnp.iinfo(jnp.int32).max


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs: never."""
    return None


def description() -> str:
    return "plain JAX"


def paged_attention(q: jax.Array, k: Pages, v: Pages, layer: jax.Array, step: Step, *, scale: float,
                    window: int | None, sinks: jax.Array | None) -> jax.Array:  # fmt: skip
    begin = jnp.arange(step.table.shape[1], dtype=jnp.int32)[None] * k.block
    begin = jnp.broadcast_to(begin, step.table.shape)

    def fetch(blocks):
        return read(k, layer, blocks, q.dtype), read(v, layer, blocks, q.dtype)

    highest, total, mixed = softmax_over_blocks(
        q, fetch, step.table, begin, step, block=k.block, scale=scale, window=window, width=q.shape[-1]
    )
    highest = jnp.where(jnp.isfinite(highest), highest, 0.0)
    parts = (einops.rearrange(a, "b h g t ... -> (b t) h g ...") for a in (highest, total, mixed))
    return einops.rearrange(whole(*parts, sinks), "(b t) h g d -> b t h g d", b=q.shape[0])


def latent_attention(q: jax.Array, latent: Pages, layer: jax.Array, step: Step, *, rank: int, scale: float,
                     first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    table, begin = owned(step, latent, first)

    def fetch(blocks):
        rows = read(latent, layer, blocks, q.dtype)
        return rows, rows[..., :rank]

    highest, total, mixed = softmax_over_blocks(
        q[:, :, None], fetch, table, begin, step, block=latent.block, scale=scale, window=None, width=rank
    )
    highest, total = (einops.rearrange(a, "b 1 h t -> b t h") for a in (highest, total))
    return highest, total, einops.rearrange(mixed, "b 1 h t r -> b t h r")


def owned(step: Step, pages: Pages, first: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Each request's live blocks among `pages`, whose first is block `first` of all: their index in pages and the
    position of their first token, int32 [B, blocks], in order and at the front; the rest never begin."""
    begin = jnp.arange(step.table.shape[1], dtype=jnp.int32)[None] * pages.block
    local = step.table - first
    mine = (local >= 0) & (local < pages.blocks) & (begin < live_tokens(step))
    place = jnp.where(mine, jnp.cumsum(mine, axis=1, dtype=jnp.int32) - 1, step.table.shape[1])
    row = jnp.arange(step.table.shape[0], dtype=jnp.int32)[:, None]
    table = jnp.zeros_like(local).at[row, place].set(local, mode="drop")
    begin = jnp.full_like(local, NEVER).at[row, place].set(jnp.broadcast_to(begin, local.shape), mode="drop")
    return table, begin


def whole(highest: jax.Array, total: jax.Array, mixed: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """The softmax's result from its parts [B, heads, group], highest finite, and mixed [B, heads, group, width]; 0
    where nothing was seen. sinks: [heads, group]."""
    if sinks is not None:
        total = total + jnp.where(total > 0, jnp.exp(sinks[None] - highest), 0.0)
    return jnp.where((total > 0)[..., None], mixed / jnp.where(total > 0, total, 1.0)[..., None], 0.0)


def live_tokens(step: Step) -> jax.Array:
    """Tokens of each request in the cache, int32 [B, 1]; none of a pad row."""
    return jnp.where(step.count > 0, step.start + step.count, 0)[:, None]


def softmax_over_blocks(q: jax.Array, fetch: Callable, table: jax.Array, begin: jax.Array, step: Step, *, block: int,
                        scale: float, window: int | None, width: int):  # fmt: skip
    """Causal attention of q [B, T, heads, group, dim] over blocks `table` that hold the tokens from `begin` on, int32
    [B, n], where `begin` ascends.

    fetch(blocks [B, m]) → keys [B, m·block, heads, dim] and values [B, m·block, heads, width]. Returns the highest
    score of each query and the sum of all exp(score − highest), float32 [B, heads, group, T], and the sum of the values
    weighted so, float32 [B, heads, group, T, width].
    """
    per = max(1, min(CHUNK // block, table.shape[1]))
    pad = -table.shape[1] % per
    table = jnp.pad(table, ((0, 0), (0, pad)))
    begin = jnp.pad(begin, ((0, 0), (0, pad)), constant_values=NEVER)
    query = step.positions(q.shape[1])
    live = live_tokens(step)
    batch, tokens, heads, group, _ = q.shape
    inside = jnp.arange(block, dtype=jnp.int32)[None, None]

    def chunk(i, state):
        highest, total, mixed = state
        blocks, start = (jax.lax.dynamic_slice_in_dim(a, i * per, per, axis=1) for a in (table, begin))
        position = jnp.where(start[..., None] == NEVER, NEVER, start[..., None] + inside).reshape(batch, -1)
        keys, values = fetch(blocks)
        # A block can hold another request's old rows behind the live ones: masked, they must not even be multiplied by
        # zero, since they need not be finite.
        alive = (position < live)[:, :, None, None]
        values = jnp.where(alive, values, jnp.zeros((), q.dtype))
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

    last = (jnp.max(jnp.sum(begin < live, axis=1, dtype=jnp.int32)) + per - 1) // per
    first = jnp.zeros_like(last)
    if window is not None:
        # What lies before every live request's window is not read.
        oldest = jnp.where(step.count > 0, step.start, NEVER)
        first = jnp.maximum(jnp.min(oldest) - window + 1, 0) // (per * block)
    lower = jnp.full((batch, heads, group, tokens), -jnp.inf, jnp.float32)
    nothing = lower, jnp.zeros_like(lower), jnp.zeros((*lower.shape, width), jnp.float32)
    return jax.lax.fori_loop(first, last, chunk, nothing)
