"""Pallas kernel for TPUs: the blocks of the dense product (`ops.matmul.tpu`), for each chosen expert and its rows.

Rows are sorted by expert and cut into tiles. A grid step is a visit: one tile with one of the experts that have rows in
it. Visits go by tile and expert, so that a tile's outputs stay in fast memory until all its experts have written
theirs; the number of visits is fixed at its most, and those too many name the last matrix again, which is not read
twice.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.expert_matmul.visits import owners, ranges, share_out
from jaxwafer.ops.matmul.tpu import ROWS, arrays, cost, objection_to, outputs_of_block, product, split
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format


def objection(dtype, form: Format, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None."""
    return objection_to(form, platform)


def description(form: Format, quantise: bool) -> str:
    return "Pallas kernel"


def expert_matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array, experts: jax.Array,
                  of: int, quantise: bool) -> jax.Array:  # fmt: skip
    """x: [R, K]. The weight is widened to the dtype of x. Returns float32 [R, N]."""
    form, (count, held, outputs, stored) = weight.format, weight.values.shape
    rows = x.shape[0]
    owner = owners(experts, held)
    order = jnp.argsort(owner, stable=True)
    halves = split(x[order], weight)
    values, *scales = arrays(weight)
    tile, block = min(rows, ROWS), outputs_of_block(values)
    tiles = pl.cdiv(rows, tile)
    visits = _visits(owner, held, tile, tiles + min(held, rows) - 1)
    layer = jnp.clip(jnp.asarray(index, jnp.int32), 0, count - 1).reshape(1)

    def of_tile(n, visit, layer, tiles, *rest):
        return tiles[visit], 0

    def of_expert(n, visit, layer, tiles, experts, begin, end):
        # Where this core has no rows at all, one block is read and not all of a matrix.
        return layer[0], experts[visit], jnp.where(end[0] > begin[0], n, 0), 0

    def of_scale(*at):
        layer, expert, n, _ = of_expert(*at)
        return layer, expert, 0, n

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=5,
        grid=(pl.cdiv(outputs, block), visits[0].shape[0]),
        in_specs=[
            *(pl.BlockSpec((tile, half.shape[1]), of_tile) for half in halves),
            pl.BlockSpec((None, None, block, stored), of_expert),
            *(pl.BlockSpec((None, None, scale.shape[2], block), of_scale) for scale in scales),
        ],
        out_specs=pl.BlockSpec((tile, block), lambda n, visit, layer, tiles, *rest: (tiles[visit], n)),
    )
    call = pl.pallas_call(
        partial(_kernel, form, len(halves), tuple(weight.parts)[1:], tile),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        grid_spec=grid,
        cost_estimate=cost(halves, (values, *scales), count * held, rows, outputs, min(held, rows * held / of)),
    )
    out = call(layer, *visits, *halves, values, *scales)
    # Rows of no expert here have not been written.
    out = jnp.where((owner[order] < held)[:, None], out, 0.0)
    return jnp.zeros_like(out).at[order].set(out, unique_indices=True)


def _visits(owner: jax.Array, held: int, tile: int, most: int) -> tuple[jax.Array, ...]:
    """Of each visit the tile, the expert and the range of sorted rows, int32 [most] each; none where the range is
    empty. owner: int32 [R], `held` for rows of no expert."""
    begin, end = ranges(owner, held)
    first = begin // tile
    expert, nth, live = share_out(jnp.where(end > begin, (end - 1) // tile - first + 1, 0), most)
    at = jnp.where(live[0], first[expert] + nth, 0)
    return at, expert, jnp.where(live, begin[expert], 0), jnp.where(live, end[expert], 0)


def _kernel(form: Format, halves: int, names: tuple[str, ...], tile: int, layer, tiles, experts, begin, end, *refs):
    x, (values, *scales), out = refs[:halves], refs[halves:-1], refs[-1]
    visit = pl.program_id(1)

    @pl.when(end[visit] > begin[visit])
    def _():
        wide = {name: scale[...] for name, scale in zip(names, scales, strict=True)}
        here = product(form, [half[...] for half in x], values[...], wide)
        row = tiles[visit] * tile + jax.lax.broadcasted_iota(jnp.int32, here.shape, 0)
        out[...] = jnp.where((row >= begin[visit]) & (row < end[visit]), here, out[...])
