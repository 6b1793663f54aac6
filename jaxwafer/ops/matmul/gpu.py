"""Pallas kernel for GPUs, through Triton: weights are loaded as stored, widened in registers and multiplied there.

A program has some outputs and some rows of x, and goes through the inputs in chunks. Every weight gathers its own
scale, which lies in the cache beside its neighbours'. Sizes need not divide: what lies past an end is masked.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxwafer.ops.widen import bits, e2m1, e4m3, wide_scale
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

# Outputs and rows of a program, and stored elements of a row a step. Matrix units take no fewer rows than 16.
OUTPUTS, ROWS, CHUNK = 32, 16, 128
# The custom call that Triton's kernels become in a lowered program.
KERNEL = "__gpu$xla.gpu.triton"


def objection(dtype, form: Format, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None. What is not quantised XLA multiplies as well."""
    if platform != "gpu":
        return f"not made for {platform}"
    return f"no GPU kernel for {form.name} weights" if form.scale is None else None


def description(form: Format, quantise: bool) -> str:
    return "Pallas kernel by Triton"


def matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array, quantise: bool, *,
           interpret: bool = False) -> jax.Array:  # fmt: skip
    """x: [M, K] float32 or bfloat16. The weight is widened to the dtype of x. Returns float32 [M, N]."""
    form, (count, outputs, stored) = weight.format, weight.values.shape
    rows, inputs = x.shape[0], stored * (2 if form.packed else 1)
    x = jnp.pad(x, ((0, -rows % ROWS), (0, inputs - x.shape[1])))
    layer = jnp.clip(jnp.asarray(index, jnp.int32), 0, count - 1).reshape(1)
    parts = {name: bits(part) for name, part in weight.parts.items()}
    if form.dtype == "float8_e4m3fn":
        parts["values"] = jax.lax.bitcast_convert_type(parts["values"], jnp.uint8)
    call = pl.pallas_call(
        partial(_kernel, form, tuple(parts)[1:], outputs),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32),
        grid=(pl.cdiv(outputs, OUTPUTS), x.shape[0] // ROWS),
        compiler_params=None if interpret else triton.CompilerParams(num_warps=4, num_stages=3),
        interpret=interpret,
    )
    return call(layer, x, *parts.values())[:rows]


def _kernel(form: Format, names: tuple[str, ...], outputs: int, layer, x, values, *refs):
    *scales, out = refs
    scales = dict(zip(names, scales, strict=True))
    index, stored = layer[0], values.shape[2]
    n = pl.program_id(0) * OUTPUTS + jnp.arange(OUTPUTS, dtype=jnp.int32)
    m = pl.program_id(1) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    each = 2 if form.packed else 1

    def chunk(number, total):
        k = number * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        inside = (n < outputs)[:, None] & (k < stored)[None]
        part = _load(values, (index, n[:, None], k[None]), inside).astype(jnp.int32 if form.packed else values.dtype)
        group = (k * each // form.group if form.group else jnp.zeros_like(k))[None]
        here = {name: _load(ref, (index, n[:, None], group), inside) for name, ref in scales.items()}
        for half in range(each):
            wide = _widen(form, part, half, here)
            wide = jnp.where(inside, wide, 0.0).astype(x.dtype)
            rows = _load(x, (m[:, None], k[None] * each + half), (k < stored)[None] & (m >= 0)[:, None])
            total += triton.dot(rows, wide, trans_b=True, allow_tf32=False)
        return total

    total = jnp.zeros((ROWS, OUTPUTS), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(stored, CHUNK), chunk, total)
    triton.store(out.at[m[:, None], n[None]], total, mask=(m >= 0)[:, None] & (n < outputs)[None])


def _load(ref, index: tuple, inside: jax.Array) -> jax.Array:
    return triton.load(ref.at[index], mask=inside, other=0)


def _widen(form: Format, part: jax.Array, half: int, scales: dict[str, jax.Array]) -> jax.Array:
    """Stored elements, or one nibble of each byte, as float32."""
    if form.packed:
        nibble = (part >> (4 * half)) & 15
        wide = e2m1(nibble) if form.dtype == "float4_e2m1fn" else nibble.astype(jnp.float32)
    elif form.dtype == "float8_e4m3fn":
        wide = e4m3(part.astype(jnp.int32))
    else:
        wide = part.astype(jnp.float32)
    if form.dtype != "float4_e2m1fn":
        wide = wide - (scales["zero"].astype(jnp.float32) if form.zero else jnp.float32(form.offset))
    wide = wide * wide_scale(scales["scale"], form)
    return wide + wide_scale(scales["minimum"], form) if form.minimum else wide
