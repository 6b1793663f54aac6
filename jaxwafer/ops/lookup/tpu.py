"""Pallas kernel for TPUs: the tile that a row of bytes is in comes into fast memory, and the row is taken there.

XLA would take the row from a copy of the whole table in another tiling, at every lookup.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.main_memory import in_main_memory
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

# Rows of a tile of bytes.
TILE = 32


def objection(dtype, form: Format, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None."""
    if platform != "tpu":
        return f"not made for {platform}"
    return None if form.numpy.itemsize == 1 else f"XLA looks {form.name} rows up as well"


def description(form: Format, quantise: bool) -> str:
    return "Pallas kernel"


def lookup(table: QuantizedArray, index: jax.Array) -> QuantizedArray:
    values, flat = table.values, index.reshape(-1)
    wide = jnp.float32 if table.format.dtype == "float8_e4m3fn" else jnp.int32
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=flat.shape,
        in_specs=[pl.BlockSpec((TILE, values.shape[1]), lambda r, index: (index[r] // TILE, 0))],
        out_specs=pl.BlockSpec((None, 1, values.shape[1]), lambda r, index: (r, 0, 0)),
    )
    call = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct((flat.size, 1, values.shape[1]), wide),
        grid_spec=grid,
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=flat.size * (TILE + 4) * values.shape[1]
        ),
    )
    rows = call(flat, in_main_memory(values)).astype(values.dtype)
    rest = {name: part[index] for name, part in table.parts.items() if name != "values"}
    return table.replace(values=rows.reshape(*index.shape, -1), **rest)


def _kernel(index, values, out):
    wide = values[...].astype(out.dtype)
    row = jax.lax.broadcasted_iota(jnp.int32, wide.shape, 0)
    here = row == index[pl.program_id(0)] % TILE
    out[...] = jnp.sum(jnp.where(here, wide, jnp.zeros_like(wide)), axis=0, keepdims=True)
