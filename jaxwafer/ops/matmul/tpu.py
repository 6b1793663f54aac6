"""Pallas kernel for TPUs: rows of the weight come into fast memory as stored and are widened there.

A block is some outputs' whole rows, so that each weight byte is read once, and is worked on in slices of inputs. The
nibbles of a byte are not brought back into order: even and odd inputs are two products. Mosaic has no narrow floats of
every kind and no repeat along lanes; scales of groups are widened by arithmetic on their bits, and spread over their
group by a product with a matrix of zeros and ones. A scale of a whole output is multiplied with what comes out.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.main_memory import in_main_memory
from jaxwafer.ops.widen import bits, e2m1, wide_scale
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

PLATFORMS = ("tpu",)
# Outputs a block, tokens a block, and inputs a slice; most bytes of a weight's block.
OUTPUTS, ROWS, SLICE, LARGEST = 256, 128, 1024, 4 << 20


def objection(dtype, form: Format, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None."""
    return objection_to(form, platform)


def objection_to(form: Format, platform: str) -> str | None:
    """Why weights of this format cannot be widened by what is here, or None."""
    if platform not in PLATFORMS:
        return f"not made for {platform}"
    if form.dtype == "float16" or (form.group and SLICE % form.group):
        return f"no TPU kernel for {form.name} weights"
    return None


def description(form: Format, quantise: bool) -> str:
    return "Pallas kernel"


def matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array, quantise: bool) -> jax.Array:
    """x: [M, K] float32 or bfloat16. The weight is widened to the dtype of x. Returns float32 [M, N]."""
    form, (count, outputs, stored) = weight.format, weight.values.shape
    rows, halves = x.shape[0], split(x, weight)
    values, *scales = arrays(weight)
    tile, block = min(rows, ROWS), outputs_of_block(values)
    layer = jnp.clip(jnp.asarray(index, jnp.int32), 0, count - 1).reshape(1)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(pl.cdiv(outputs, block), pl.cdiv(rows, tile)),
        in_specs=[
            *(pl.BlockSpec((tile, half.shape[1]), lambda n, m, layer: (m, 0)) for half in halves),
            pl.BlockSpec((None, block, stored), lambda n, m, layer: (layer[0], n, 0)),
            *(pl.BlockSpec((None, scale.shape[1], block), lambda n, m, layer: (layer[0], 0, n)) for scale in scales),
        ],
        out_specs=pl.BlockSpec((tile, block), lambda n, m, layer: (m, n)),
    )
    call = pl.pallas_call(
        partial(_kernel, form, len(halves), tuple(weight.parts)[1:]),
        out_shape=jax.ShapeDtypeStruct((rows, outputs), jnp.float32),
        grid_spec=grid,
        cost_estimate=cost(halves, (values, *scales), count, rows, outputs, 1),
    )
    return call(layer, *halves, values, *scales)


def split(x: jax.Array, weight: QuantizedArray) -> tuple[jax.Array, ...]:
    """x [M, K] padded to the weight's inputs, its even and its odd ones apart where two are in a byte."""
    packed = weight.format.packed
    inputs = weight.values.shape[-1] * (2 if packed else 1)
    if inputs > x.shape[1]:
        x = jnp.pad(x, ((0, 0), (0, inputs - x.shape[1])))
    return (x[:, ::2], x[:, 1::2]) if packed else (x,)


def arrays(weight: QuantizedArray) -> list[jax.Array]:
    """The weight's parts as kernels take them: scales with outputs along the lanes, which pads few groups least. They
    are allocated in the layout asked for here, so nothing moves."""
    values, *scales = weight.parts.values()
    return [in_main_memory(part) for part in (values, *(jnp.swapaxes(bits(scale), -1, -2) for scale in scales))]


def outputs_of_block(values: jax.Array) -> int:
    """Outputs a block of a stack [..., N, stored]: fewer where rows are long, since two blocks are held at once."""
    outputs, stored = values.shape[-2:]
    fitting = OUTPUTS if OUTPUTS * stored * values.dtype.itemsize <= LARGEST else OUTPUTS // 2
    return min(outputs, fitting)


def cost(halves: tuple, parts: tuple, count: int, rows: int, outputs: int, matrices: float) -> pl.CostEstimate:
    """What a kernel costs that reads `matrices` of the `count` in a stack, whose arrays are `parts`."""
    return pl.CostEstimate(
        flops=2 * rows * outputs * sum(half.shape[1] for half in halves),
        transcendentals=0,
        bytes_accessed=int(matrices * sum(p.size // count * p.dtype.itemsize for p in parts))
        + sum(h.size * h.dtype.itemsize for h in halves)
        + 4 * rows * outputs,
    )


def _kernel(form: Format, halves: int, names: tuple[str, ...], layer, *refs):
    """One block of outputs of some tokens."""
    x, (values, *scales), out = refs[:halves], refs[halves:-1], refs[-1]
    out[...] = product(
        form, [half[...] for half in x], values[...], {name: s[...] for name, s in zip(names, scales, strict=True)}
    )


def product(form: Format, x: list[jax.Array], values: jax.Array, scales: dict[str, jax.Array]) -> jax.Array:
    """x [M, K] @ a block of a weight [N, K]ᵀ as stored, float32 [M, N]; x in two halves [M, K/2] where packed.

    scales: [groups, N] by their names in `QuantizedArray`, as `bits` gives them.
    """
    width = SLICE // len(x)
    total = jnp.zeros((x[0].shape[0], values.shape[0]), jnp.float32)
    for start in range(0, values.shape[1], width):
        stop = min(start + width, values.shape[1])
        part = values[:, start:stop]
        group = form.group // len(x) if form.group else None
        here = {name: scale[start // group : -(-stop // group)] for name, scale in scales.items()} if group else {}
        spread = _spread(-(-(stop - start) // group), stop - start, group) if group else None
        for half, rows in enumerate(x):
            rows = rows[:, start:stop]
            wide = _widen(form, part, half, here, spread).astype(rows.dtype)
            total += dot(rows, wide, (1, 1))
            if form.minimum:
                sums = dot(rows.astype(jnp.float32), spread, (1, 1))
                total += dot(sums, wide_scale(here["minimum"], form), (1, 0))
    return total * wide_scale(scales["scale"], form) if form.scale and not form.group else total


def widened(form: Format, values: jax.Array, scales: dict[str, jax.Array]) -> list[jax.Array]:
    """A block of a weight [N, K] as float32, or its even and its odd columns where two are in a byte, without the scale
    where that is a whole output's. scales: as for `product`."""
    halves, columns = 2 if form.packed else 1, values.shape[1]
    group = form.group // halves if form.group else None
    spread = _spread(columns // group, columns, group) if group else None
    found = [_widen(form, values, half, scales, spread) for half in range(halves)]
    if form.minimum:
        low = dot(wide_scale(scales["minimum"], form), spread, (0, 0))
        found = [wide + low for wide in found]
    return found


def _widen(form: Format, part: jax.Array, half: int, scales: dict[str, jax.Array], spread) -> jax.Array:
    """Some columns of a block as float32, or one nibble of each of their bytes, without the minimum, and without the
    scale where that is a whole output's."""
    if form.packed:
        nibble = (part.astype(jnp.int32) >> (4 * half)) & 15
        wide = e2m1(nibble) if form.dtype == "float4_e2m1fn" else nibble.astype(jnp.float32) - form.offset
    else:
        wide = part.astype(jnp.float32)
    if spread is None:
        return wide
    if form.zero:
        wide = wide - dot(scales["zero"].astype(jnp.int32).astype(jnp.float32), spread, (0, 0))
    scale = wide_scale(scales["scale"], form)
    return wide * dot(scale, spread, (0, 0))


def _spread(groups: int, columns: int, group: int) -> jax.Array:
    """float32 [groups, columns], one where a column is of the group."""
    column = jax.lax.broadcasted_iota(jnp.int32, (groups, columns), 1)
    number = jax.lax.broadcasted_iota(jnp.int32, (groups, columns), 0)
    return (column // group == number).astype(jnp.float32)


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
    precision = "highest" if a.dtype == jnp.float32 else None
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(a, b, dims, precision=precision, preferred_element_type=jnp.float32)
