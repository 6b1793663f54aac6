"""Pallas kernel for GPUs, through Triton: the dense product (`ops.matmul.gpu`), for each chosen expert and its rows.

Rows are sorted by expert, and each expert's are cut into tiles. A program is a visit to one tile, for some outputs; it
looks up which rows of x are its own and writes theirs. The number of visits is fixed at its most, and those too many
read nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxwafer.model.mlp import Activation
from jaxwafer.ops.activation import activate
from jaxwafer.ops.expert_matmul import reference
from jaxwafer.ops.expert_matmul.visits import owners, ranges, share_out
from jaxwafer.ops.gpu_kernel import load, objection_to, reachable
from jaxwafer.ops.matmul.gpu import CHUNK, OUTPUTS, ROWS, arrays, product, store
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format


def objection(dtype, form: Format, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None."""
    return objection_to(platform)


def description(form: Format, quantise: bool) -> str:
    return "Pallas kernel by Triton"


def expert_matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array, experts: jax.Array,
                  of: int, quantise: bool) -> jax.Array:  # fmt: skip
    """x: [R, K]. The weight is widened to the dtype of x. Returns float32 [R, N]."""
    if not _addressable(weight, experts.shape[0]):
        return reference.expert_matmul(x, weight, index, experts, of, quantise)
    return _products(x, (weight,), index, experts)[0]


def gated(x: jax.Array, gate: QuantizedArray, up: QuantizedArray, index: jax.Array, experts: jax.Array,
          activation: Activation, of: int, quantise: bool) -> jax.Array:  # fmt: skip
    """x: [X, K], of which each row has R / X of the experts in turn. Returns float32 [R, N]."""
    if not _addressable(gate, experts.shape[0]):
        return reference.gated(x, gate, up, index, experts, activation, of, quantise)
    return activate(activation, *_products(x, (gate, up), index, experts))


def _addressable(weight: QuantizedArray, rows: int) -> bool:
    """Whether the kernel can address the stack, or else a copy of the matrices of `rows` rows."""
    _, held, *matrix = weight.values.shape
    shapes = weight.values.shape, (min(held, rows), *matrix)
    return any(reachable(shape, weight.values.dtype) for shape in shapes)


def _products(x: jax.Array, weights: tuple[QuantizedArray, ...], index: jax.Array, experts: jax.Array) -> list:
    """Products with several stacks of one format and shape, float32 [R, N] each."""
    count, held, outputs, _ = weights[0].values.shape
    rows = experts.shape[0]
    owner = owners(experts, held)
    order = jnp.argsort(owner, stable=True)
    begin, end = ranges(owner, held)
    filled = min(held, rows)
    expert, nth, live = share_out((end - begin + ROWS - 1) // ROWS, filled + (rows - filled) // ROWS)
    first = begin[expert] + nth * ROWS
    last = jnp.where(live, jnp.minimum(first + ROWS, end[expert]), first)
    layer = jnp.clip(jnp.asarray(index, jnp.int32), 0, count - 1)
    if reachable(weights[0].values.shape, weights[0].values.dtype):
        # One stack of the matrices of all layers and experts.
        weights = [jax.tree.map(lambda part: part.reshape(-1, *part.shape[2:]), weight) for weight in weights]
        matrix = layer * held + expert
    else:
        used = end > begin
        copied = jnp.nonzero(used, size=filled, fill_value=0)[0]
        weights = [weight[layer, copied] for weight in weights]
        matrix = (jnp.cumsum(used, dtype=jnp.int32) - 1)[expert]
    parts = [arrays(weight) for weight in weights]
    names = tuple(parts[0])
    call = pl.pallas_call(
        partial(_kernel, weights[0].format, names, len(weights), rows // max(1, x.shape[0])),
        out_shape=[jax.ShapeDtypeStruct((rows, outputs), jnp.float32)] * len(weights),
        grid=(pl.cdiv(outputs, OUTPUTS), expert.shape[0]),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
    )
    out = call(matrix, first, last, order, x, *(part for each in parts for part in each.values()))
    # Rows of no expert here have not been written.
    return [jnp.where((owner < held)[:, None], product, 0.0) for product in out]


def _kernel(form: Format, names: tuple[str, ...], weights: int, times: int, matrix, first, last, order, x, *refs):
    n = pl.program_id(0) * OUTPUTS + jnp.arange(OUTPUTS, dtype=jnp.int32)
    visit = pl.program_id(1)
    place = first[visit] + jnp.arange(ROWS, dtype=jnp.int32)
    real = place < last[visit]
    # Others are no row at all, lest they be taken for the first.
    row = jnp.where(real, load(order, (place,), real), order.shape[0])
    for number, out in enumerate(refs[-weights:]):
        parts = dict(zip(names, refs[number * len(names) :][: len(names)], strict=True))
        chunks = pl.cdiv(parts["values"].shape[2], CHUNK) * (first[visit] < last[visit]).astype(jnp.int32)
        store(out, row, real, n, product(form, parts, matrix[visit], n, x, row // times, real, chunks))
