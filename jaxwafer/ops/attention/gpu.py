"""Pallas kernel for decoding on GPUs, through Triton: an online softmax over tiles of live tokens.

A program has some queries of one kv head of a request, and a part of the request's live tokens: so many parts that few
requests with long contexts fill a GPU too; they are joined after. It looks up the blocks of a tile as it goes, and
loads nothing of dead tokens. Chunks of a prompt take the plain path.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxwafer.ops.attention import reference
from jaxwafer.ops.gpu_kernel import (
    E4M3_UNIT,
    as_bits,
    from_stored,
    layers_reachable,
    load,
    objection_to,
    within_reach,
)
from jaxwafer.ops.pages import Pages, power_of_two
from jaxwafer.ops.step import Step

LOWEST = float(jnp.finfo(jnp.float32).min)
# How many programs fill a GPU some times over, and tiles that a part should have so that joining costs little.
PROGRAMS, LEAST = 512, 4
# Most tokens of a tile, and most bytes of their keys: two such tiles and the queries fit into shared memory.
TOKENS, BYTES = 64, 40 << 10
# Matrix units take no fewer rows and columns.
SMALLEST = 16


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None."""
    return objection_to(platform)


def description() -> str:
    return "Pallas kernel by Triton for decoding, plain JAX for prompts"


def paged_attention(q: jax.Array, k: Pages, v: Pages, layer: jax.Array, step: Step, *, scale: float,
                    window: int | None, sinks: jax.Array | None) -> jax.Array:  # fmt: skip
    if q.shape[1] > 1 or not layers_reachable(k):
        return reference.paged_attention(q, k, v, layer, step, scale=scale, window=window, sinks=sinks)
    begin = jnp.arange(step.table.shape[1], dtype=jnp.int32)[None] * k.block
    begin = jnp.broadcast_to(begin, step.table.shape)
    first = jnp.maximum(step.start - window + 1, 0) if window is not None else jnp.zeros_like(step.start)
    tokens = first, reference.live_tokens(step)[:, 0]
    parts = _decode(q[:, 0], k, v, layer, step, step.table, begin, tokens, scale=scale, window=window,
                    pieces=(q.shape[-1],))  # fmt: skip
    return reference.whole(*parts, sinks)[:, None]


def latent_attention(q: jax.Array, latent: Pages, layer: jax.Array, step: Step, *, rank: int, scale: float,
                     first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    if q.shape[1] > 1 or not layers_reachable(latent):
        return reference.latent_attention(q, latent, layer, step, rank=rank, scale=scale, first=first)
    table, begin = reference.owned(step, latent, first)
    count = jnp.sum(begin < reference.NEVER, axis=1, dtype=jnp.int32) * latent.block
    pieces = (rank, q.shape[-1] - rank) if rank < q.shape[-1] else (rank,)
    highest, total, mixed = _decode(q[:, :1], latent, None, layer, step, table, begin, (jnp.zeros_like(count), count),
                                    scale=scale, window=None, pieces=pieces)  # fmt: skip
    return jnp.where(total > 0, highest, -jnp.inf), total, mixed


def _decode(q: jax.Array, k: Pages, v: Pages | None, layer: jax.Array, step: Step, table: jax.Array,
            begin: jax.Array, tokens: tuple[jax.Array, jax.Array], *, scale: float, window: int | None,
            pieces: tuple[int, ...]):  # fmt: skip
    """Parts of a softmax of q [B, heads, group, dim] over blocks `table`, whose tokens begin at `begin`; counted from
    the first block's first, tokens[0] … tokens[1] − 1 are read, int32 [B] each. pieces: dim as a sum, of which the
    first is the width of values. v None: these are the keys' first piece.

    highest (finite) and total float32 [B, heads, group], mixed [B, heads, group, width].
    """
    batch, heads, group, _ = q.shape
    padded = [max(SMALLEST, pl.next_power_of_2(size)) for size in pieces]
    # float32 is for checking: no matrix unit multiplies it whole, and twice the rows would not fit.
    rows = SMALLEST if group <= SMALLEST or q.dtype == jnp.float32 else 2 * SMALLEST
    tile = BYTES // (sum(padded) * q.dtype.itemsize)
    tile = min(TOKENS, max(SMALLEST, pl.next_power_of_2(tile + 1) // 2))
    most = min(table.shape[1], k.blocks) * k.block
    most = most if window is None else min(most, window)
    programs = batch * heads * pl.cdiv(group, rows)
    parts = max(1, min(PROGRAMS // programs, most // (LEAST * tile)))
    # Keys and values are of one shape.
    layer = jnp.asarray(layer, jnp.int32)
    stacks, (layer, *_) = zip(*(within_reach(pages, layer) for pages in (k, v) if pages), strict=True)
    arrays = [a for pages in stacks for a in (as_bits(pages.values), pages.exponent) if a is not None]
    shape = batch, parts, heads, group
    call = pl.pallas_call(
        partial(_kernel, scale=scale, window=window, pieces=pieces, padded=padded, rows=rows, tile=tile,
                scaled=k.exponent is not None),
        out_shape=[jax.ShapeDtypeStruct(s, jnp.float32) for s in (shape, shape, (*shape, pieces[0]))],
        grid=(heads * pl.cdiv(group, rows), parts, batch),
        compiler_params=triton.CompilerParams(num_warps=8 if sum(padded) > 256 else 4, num_stages=2),
    )  # fmt: skip
    highest, total, mixed = call(layer.reshape(1), table, begin, *tokens, step.start, q, *arrays)
    top = jnp.max(highest, axis=1, keepdims=True)
    share = jnp.exp(highest - top)
    return top[:, 0], jnp.sum(share * total, axis=1), jnp.sum(share[..., None] * mixed, axis=1)


def _kernel(layer, table, begin, first, last, start, q, *refs, scale: float, window: int | None,
            pieces: tuple[int, ...], padded: list[int], rows: int, tile: int, scaled: bool):  # fmt: skip
    *pages, highest, total, mixed = refs
    k, v = pages[: 1 + scaled], pages[1 + scaled :]
    group, block = q.shape[2], k[0].shape[2]
    head, rest = pl.program_id(0) // pl.cdiv(group, rows), pl.program_id(0) % pl.cdiv(group, rows)
    part, b = pl.program_id(1), pl.program_id(2)
    g = rest * rows + jnp.arange(rows, dtype=jnp.int32)
    # Of each piece its elements, and which of them there are.
    columns, ends = [], []
    for number, width in enumerate(padded):
        offset = sum(pieces[:number])
        columns.append(offset + jnp.arange(width, dtype=jnp.int32)[None])
        ends.append(columns[-1] < offset + pieces[number])
    queries = [load(q, (b, head, g[:, None], c), (g < group)[:, None] & e) for c, e in zip(columns, ends, strict=True)]
    now, begins = start[b], first[b]
    tiles = pl.cdiv(jnp.maximum(last[b] - begins, 0), tile)
    share = pl.cdiv(tiles, highest.shape[1])

    def visit(number, carry):
        top, sums, mixture = carry
        token = begins + number * tile + jnp.arange(tile, dtype=jnp.int32)
        column, inside = token // block, token < last[b]
        position = load(begin, (b, column), inside) + token % block
        # Past the live rows of a block there may be anything, infinities among it.
        seen = inside & (position <= now)
        if window is not None:
            seen = seen & (position > now - window)
        at = layer[0], load(table, (b, column), inside), token % block, head

        def numbers(ref, piece: int) -> jax.Array:
            where = (at[0], at[1][:, None], at[2][:, None], head, columns[piece])
            return from_stored(load(ref, where, seen[:, None] & ends[piece])).astype(q.dtype)

        keys = [numbers(k[0], piece) for piece in range(len(pieces))]
        score = sum(_dot(a, b, trans_b=True) for a, b in zip(queries, keys, strict=True)) * (scale * unit)
        if scaled:
            score = score * power_of_two(load(k[1], at, seen))[None]
        score = jnp.where(seen[None], score, LOWEST)
        above = jnp.maximum(top, jnp.max(score, axis=1))
        weight = jnp.where(seen[None], jnp.exp(score - above[:, None]), 0.0)
        keep = jnp.exp(top - above)
        sums = keep * sums + jnp.sum(weight, axis=1)
        if scaled:
            weight = weight * power_of_two(load((v or k)[1], at, seen))[None]
        values = numbers(v[0], 0) if v else keys[0]
        return above, sums, keep[:, None] * mixture + _dot(weight.astype(q.dtype), values)

    unit = E4M3_UNIT if k[0].dtype == jnp.uint8 else 1.0
    nothing = jnp.full((rows,), LOWEST, jnp.float32), jnp.zeros((rows,), jnp.float32)
    nothing = *nothing, jnp.zeros((rows, padded[0]), jnp.float32)
    top, sums, mixture = jax.lax.fori_loop(part * share, jnp.minimum((part + 1) * share, tiles), visit, nothing)
    triton.store(highest.at[b, part, head, g], top, mask=g < group)
    triton.store(total.at[b, part, head, g], sums, mask=g < group)
    triton.store(mixed.at[b, part, head, g[:, None], columns[0]], mixture * unit, mask=(g < group)[:, None] & ends[0])


def _dot(a: jax.Array, b: jax.Array, *, trans_b: bool = False) -> jax.Array:
    return triton.dot(a, b, trans_b=trans_b, allow_tf32=False)
