"""Pallas kernel for TPUs: the blocks that rows belong to come into fast memory, and go back with them.

A row is less than a tile, so that its block is read and written around it, several at once. The cache stays in main
memory, in the layout that attention reads: XLA's scatter asks for another one, and copies the cache between them.
"""

import math
from functools import partial

import einops
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.by_head import by_head, from_by_head
from jaxwafer.ops.pages import Pages, as_stored

# Blocks in fast memory together, and most bytes of these and their new rows.
GROUP, LARGEST = 8, 8 << 20


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None."""
    return None if platform == "tpu" else f"not made for {platform}"


def description() -> str:
    return "Pallas kernel"


def append(pages: Pages, layer: jax.Array, block: jax.Array, offset: jax.Array, rows: jax.Array) -> Pages:
    stored = by_head(pages)
    new = [part for part in as_stored(pages, rows) if part is not None]
    # Mosaic chooses between numbers of 32 bits.
    new = [a.astype(jnp.float32 if a.dtype == jnp.float32 else jnp.int32) for a in new]
    block = jnp.where((block >= 0) & (block < pages.blocks), block, -1)
    if rows.shape[1] == 1:
        block, low = block[:, 0], offset[:, 0]
        high = low + 1
    else:
        new, block, low, high = _runs(new, block, offset, pages.block)
    new = [einops.rearrange(a, "r s h ... -> r h s ...") for a in new]
    runs = len(block)
    each = [math.prod(a.shape[2:]) * a.dtype.itemsize for a in stored]
    wide = [math.prod(a.shape[1:]) * a.dtype.itemsize for a in new]
    group = max(1, min(GROUP, runs, LARGEST // (sum(each) + 2 * sum(wide))))
    block = jnp.pad(block, (0, -runs % group), constant_values=-1)
    scalars, parts = (jnp.asarray(layer, jnp.int32).reshape(1), block, low, high), len(stored)
    anywhere = [pl.BlockSpec(memory_space=pl.ANY)] * parts
    call = pl.pallas_call(
        partial(_kernel, group=group),
        out_shape=[pltpu.HBM(a.shape, a.dtype) for a in stored],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(pl.cdiv(runs, group),),
            in_specs=[
                *(pl.BlockSpec((group, *a.shape[1:]), lambda g, *s, n=a.ndim: (g, *(0,) * (n - 1))) for a in new),
                *anywhere,
            ],
            out_specs=anywhere,
            scratch_shapes=[
                *(pltpu.VMEM((group, *a.shape[2:]), a.dtype) for a in stored),
                pltpu.SemaphoreType.DMA((parts, group)),
            ],
        ),
        input_output_aliases={len(scalars) + parts + number: number for number in range(parts)},
        cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=runs * (2 * sum(each) + sum(wide))),
    )
    return from_by_head(call(*scalars, *new, *stored))


def _runs(new: list[jax.Array], block: jax.Array, offset: jax.Array, size: int):
    """Rows [B, T, …] of requests by the blocks that they come to lie in: new rows [runs, size, …] each at its offset;
    the block of a run, −1 where nothing is kept; and between which offsets its new rows are."""
    batch, tokens = block.shape
    number = 1 + (tokens + size - 2) // size
    token = jnp.arange(number * size, dtype=jnp.int32)[None] - offset[:, :1]
    within = jnp.clip(token, 0, tokens - 1)
    owner = jnp.where(token == within, jnp.take_along_axis(block, within, axis=1), -1)
    owner = einops.rearrange(owner, "b (j s) -> (b j) s", s=size)
    place = jnp.arange(size, dtype=jnp.int32)[None]
    low = jnp.min(jnp.where(owner >= 0, place, size), axis=1)
    high = jnp.max(jnp.where(owner >= 0, place + 1, 0), axis=1)
    request = jnp.arange(batch, dtype=jnp.int32)[:, None]
    new = [einops.rearrange(a[request, within], "b (j s) ... -> (b j) s ...", s=size) for a in new]
    return new, jnp.max(owner, axis=1), low, high


def _kernel(layer, block, low, high, *refs, group: int):
    """A group of blocks: in, their new rows put in place, and out again; nothing of a block that is none."""
    *refs, done = refs
    parts = len(refs) // 4
    new, before, after, held = (refs[number * parts : (number + 1) * parts] for number in range(4))
    first = pl.program_id(0) * group

    def arriving(number: int) -> list:
        place = layer[0], block[first + number]
        return [
            pltpu.make_async_copy(main.at[place], fast.at[number], done.at[part, number])
            for part, (main, fast) in enumerate(zip(before, held, strict=True))
        ]

    def leaving(number: int) -> list:
        place = layer[0], block[first + number]
        return [
            pltpu.make_async_copy(fast.at[number], main.at[place], done.at[part, number])
            for part, (main, fast) in enumerate(zip(after, held, strict=True))
        ]

    def each(act) -> None:
        for number in range(group):
            pl.when(block[first + number] >= 0)(partial(act, number))

    def fetch(number: int) -> None:
        for copy in arriving(number):
            copy.start()

    def replace(number: int) -> None:
        for copy in arriving(number):
            copy.wait()
        for rows, fast in zip(new, held, strict=True):
            old = fast[number].astype(rows.dtype)
            place = jax.lax.broadcasted_iota(jnp.int32, old.shape, 1)
            here = (place >= low[first + number]) & (place < high[first + number])
            fast[number] = jnp.where(here, rows[number], old).astype(fast.dtype)
        for copy in leaving(number):
            copy.start()

    def finish(number: int) -> None:
        for copy in leaving(number):
            copy.wait()

    for act in (fetch, replace, finish):
        each(act)
