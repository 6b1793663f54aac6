"""Pallas kernel for decoding on TPUs: one grid step a live block, an online softmax in fast memory.

A block number is looked up as the grid goes along, so that a block comes in as it is stored and no dead one is read:
past a request's last block the grid names that one again, which is not fetched twice. Chunks of a prompt take the plain
path.
"""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.attention import reference
from jaxwafer.ops.bits import NUMBERS
from jaxwafer.ops.by_head import by_head
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step
from jaxwafer.ops.widen import e4m3

LOWEST = float(jnp.finfo(jnp.float32).min)


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None."""
    return None if platform == "tpu" else f"not made for {platform}"


def description() -> str:
    return "Pallas kernel for decoding, plain JAX for prompts"


def paged_attention(q: jax.Array, k: Pages, v: Pages, layer: jax.Array, step: Step, *, scale: float,
                    window: int | None, sinks: jax.Array | None) -> jax.Array:  # fmt: skip
    if q.shape[1] > 1:
        return reference.paged_attention(q, k, v, layer, step, scale=scale, window=window, sinks=sinks)
    begin = jnp.arange(step.table.shape[1], dtype=jnp.int32)[None] * k.block
    begin = jnp.where(begin < reference.live_tokens(step), begin, reference.NEVER)
    highest, total, mixed = _decode(
        q[:, 0], k, v, layer, step, step.table, begin, scale=scale, window=window, width=q.shape[-1],
    )  # fmt: skip
    return reference.whole(highest[..., 0], total[..., 0], mixed, sinks)[:, None]


def latent_attention(q: jax.Array, latent: Pages, layer: jax.Array, step: Step, *, rank: int, scale: float,
                     first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    if q.shape[1] > 1:
        return reference.latent_attention(q, latent, layer, step, rank=rank, scale=scale, first=first)
    table, begin = reference.owned(step, latent, first)
    highest, total, mixed = _decode(
        q[:, :1], latent, None, layer, step, table, begin, scale=scale, window=None, width=rank
    )
    highest = jnp.where(total > 0, highest, -jnp.inf)
    return highest[..., 0], total[..., 0], mixed


def _decode(q: jax.Array, k: Pages, v: Pages | None, layer: jax.Array, step: Step, table: jax.Array,
            begin: jax.Array, *, scale: float, window: int | None, width: int):  # fmt: skip
    """Parts of a softmax of q [B, heads, group, dim] over the blocks whose tokens begin at `begin`, NEVER at the end:
    highest and total float32 [B, heads, group, 1], mixed [B, heads, group, width]. v None: values are the keys' first
    `width` elements."""
    batch, heads, group, dim = q.shape
    block = k.block
    count = jnp.sum(begin < reference.NEVER, axis=1, dtype=jnp.int32)
    if window is not None:
        # Blocks wholly before the window are passed over.
        old = jnp.sum(begin <= step.start[:, None] - window + 1 - block, axis=1, dtype=jnp.int32)
    else:
        old = jnp.zeros_like(count)
    scalars = (jnp.asarray(layer, jnp.int32).reshape(1), table, begin, old, count, step.start)
    arrays = [part for pages in (k, v) if pages is not None for part in by_head(pages)]

    def of_block(b, j, layer, table, begin, old, count, start):
        return layer[0], table[b, jnp.clip(old[b] + j, 0, jnp.maximum(count[b] - 1, 0))], 0, 0

    def of_request(b, j, *scalars):
        return b, 0, 0, 0

    specs = [pl.BlockSpec((None, heads, group, dim), of_request)]
    for array in arrays:
        tail = array.shape[2:]
        index = (lambda b, j, *s: (*of_block(b, j, *s), 0)) if len(tail) == 3 else of_block
        specs.append(pl.BlockSpec((None, None, *tail), index))
    # Where a wafer's blocks are divided among cores, this one has no more than its own.
    most = min(batch * table.shape[1], k.blocks)
    shapes = [(batch, heads, group, 1), (batch, heads, group, 1), (batch, heads, group, width)]
    call = pl.pallas_call(
        partial(_kernel, scale=scale, window=window, width=width, block=block, scaled=k.exponent is not None,
                shared=v is None),
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(batch, table.shape[1]),
            in_specs=specs,
            out_specs=[pl.BlockSpec((None, *shape[1:]), of_request) for shape in shapes],
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * heads * group * dim * most * block,
            transcendentals=heads * group * most * block,
            bytes_accessed=most * sum(math.prod(a.shape[2:]) * a.dtype.itemsize for a in arrays),
        ),
    )  # fmt: skip
    return call(*scalars, q, *arrays)


def _kernel(layer, table, begin, old, count, start, q, *refs, scale: float, window: int | None, width: int, block: int,
            scaled: bool, shared: bool):  # fmt: skip
    b, j = pl.program_id(0), pl.program_id(1)
    *pages, highest, total, mixed = refs

    @pl.when(j == 0)
    def _():
        highest[...] = jnp.full(highest.shape, LOWEST, jnp.float32)
        total[...] = jnp.zeros(total.shape, jnp.float32)
        mixed[...] = jnp.zeros(mixed.shape, jnp.float32)

    @pl.when(old[b] + j < count[b])
    def _():
        each = 1 + scaled
        keys = _rows(pages[:each])
        values = keys[..., :width] if shared else _rows(pages[each:])
        position = begin[b, old[b] + j] + jax.lax.broadcasted_iota(jnp.int32, (1, 1, block), 2)
        seen = position <= start[b]
        if window is not None:
            seen = seen & (position > start[b] - window)
        score = scale * _product(q[...], keys, 2)
        score = jnp.where(seen, score, LOWEST)
        top = jnp.maximum(highest[...], jnp.max(score, axis=2, keepdims=True))
        weight = jnp.where(seen, jnp.exp(score - top), 0.0)
        keep = jnp.exp(highest[...] - top)
        highest[...] = top
        total[...] = keep * total[...] + jnp.sum(weight, axis=2, keepdims=True)
        # Rows behind the live ones may hold anything, infinities among it.
        tokens = jax.lax.broadcasted_iota(jnp.int32, (1, block, 1), 1) + begin[b, old[b] + j]
        values = jnp.where(tokens <= start[b], values, 0.0)
        mixed[...] = keep * mixed[...] + _product(weight, values, 1)


def _rows(refs) -> jax.Array:
    """float32 [heads, block, dim] of a block as stored."""
    stored = refs[0][...]
    number = NUMBERS.get(stored.dtype)
    if number == jnp.float8_e4m3fn:
        wide = e4m3(stored.astype(jnp.int32))
    elif number == jnp.bfloat16:
        wide = jax.lax.bitcast_convert_type(stored.astype(jnp.int32) << 16, jnp.float32)
    else:
        wide = stored.astype(jnp.float32)
    if len(refs) == 1:
        return wide
    power = jax.lax.bitcast_convert_type((refs[1][...].astype(jnp.int32) + 127) << 23, jnp.float32)
    return wide * power[..., None]


def _product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """a [heads, M, K] times b [heads, N, K] (axis 2) or [heads, K, N] (axis 1), float32 [heads, M, N]."""
    dims = (((2,), (axis,)), ((0,), (0,)))
    return jax.lax.dot_general(a.astype(jnp.float32), b, dims, precision="highest",
                               preferred_element_type=jnp.float32)  # fmt: skip
