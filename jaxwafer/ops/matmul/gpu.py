"""Pallas kernel for GPUs, through Triton: weights are loaded as stored, widened in registers and multiplied there.

A program has some outputs and some rows of x, and goes through the inputs in chunks. Every weight gathers its own
scale, which lies in the cache beside its neighbours'. Sizes need not divide: what lies past an end is masked.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from jaxwafer.ops.gpu_kernel import (
    E4M3_UNIT,
    as_bits,
    e4m3_in_units,
    layers_reachable,
    load,
    objection_to,
    within_reach,
)
from jaxwafer.ops.matmul import reference
from jaxwafer.ops.widen import bits, e2m1, wide_scale
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

# Outputs and rows of a program, and stored elements of a row a step. Matrix units take no fewer rows than 16.
OUTPUTS, ROWS, CHUNK = 32, 16, 128


def objection(dtype, form: Format, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None. What is not quantised XLA multiplies as well."""
    return objection_to(platform) or (f"no GPU kernel for {form.name} weights" if form.scale is None else None)


def description(form: Format, quantise: bool) -> str:
    return "Pallas kernel by Triton"


def matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array, quantise: bool) -> jax.Array:
    """x: [M, K] float32 or bfloat16. The weight is widened to the dtype of x. Returns float32 [M, N]."""
    count, outputs, _ = weight.values.shape
    if not layers_reachable(weight):
        return reference.matmul(x, weight, index, quantise)
    weight, layer = within_reach(weight, jnp.clip(jnp.asarray(index, jnp.int32), 0, count - 1))
    parts = arrays(weight)
    call = pl.pallas_call(
        partial(_kernel, weight.format, tuple(parts)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], outputs), jnp.float32),
        grid=(pl.cdiv(outputs, OUTPUTS), pl.cdiv(x.shape[0], ROWS)),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=3),
    )
    return call(layer.reshape(1), x, *parts.values())


def arrays(weight: QuantizedArray) -> dict[str, jax.Array]:
    """The weight's parts as the kernel takes them, by name."""
    parts = {name: bits(part) for name, part in weight.parts.items()}
    values = weight.values
    return parts | {"values": as_bits(values) if weight.format.dtype == "float8_e4m3fn" else values}


def _kernel(form: Format, names: tuple[str, ...], layer, x, *refs):
    *parts, out = refs
    n = pl.program_id(0) * OUTPUTS + jnp.arange(OUTPUTS, dtype=jnp.int32)
    m = pl.program_id(1) * ROWS + jnp.arange(ROWS, dtype=jnp.int32)
    real = m < x.shape[0]
    parts = dict(zip(names, parts, strict=True))
    total = product(form, parts, layer[0], n, x, m, real, pl.cdiv(parts["values"].shape[2], CHUNK))
    store(out, m, real, n, total)


def store(out, m: jax.Array, real: jax.Array, n: jax.Array, total: jax.Array) -> None:
    """Write `total` to rows m, those that are `real`, and columns n."""
    triton.store(out.at[m[:, None], n[None]], total, mask=real[:, None] & (n < out.shape[1])[None])


def product(form: Format, parts: dict, index: jax.Array, n: jax.Array, x, m: jax.Array, real: jax.Array,
            chunks: jax.Array | int) -> jax.Array:  # fmt: skip
    """Rows m of x [M, K], those that are `real`, by outputs n of matrix `index` of a stack [S, N, K], its first
    `chunks` of them: float32 [rows, outputs]. parts: references to `arrays`; K may be short of theirs."""
    _, outputs, stored = parts["values"].shape
    each = 2 if form.packed else 1

    def chunk(number, total):
        k = number * CHUNK + jnp.arange(CHUNK, dtype=jnp.int32)
        inside = (n < outputs)[:, None] & (k < stored)[None]
        group = (k * each // form.group if form.group else jnp.zeros_like(k))[None]
        here = {
            name: load(ref, (index, n[:, None], k[None] if name == "values" else group), inside)
            for name, ref in parts.items()
        }
        if form.packed:
            here["values"] = here["values"].astype(jnp.int32)
        for half in range(each):
            wide = jnp.where(inside, _widen(form, here, half), 0.0).astype(x.dtype)
            column = k * each + half
            rows = load(x, (m[:, None], column[None]), real[:, None] & (column < x.shape[1])[None])
            total += triton.dot(rows, wide, trans_b=True, allow_tf32=False)
        return total

    total = jnp.zeros((m.shape[0], n.shape[0]), jnp.float32)
    return jax.lax.fori_loop(0, chunks, chunk, total)


def _widen(form: Format, parts: dict[str, jax.Array], half: int) -> jax.Array:
    """Stored elements, or one nibble of each byte, as float32."""
    wide = parts["values"]
    if form.packed:
        nibble = (wide >> (4 * half)) & 15
        wide = e2m1(nibble) if form.dtype == "float4_e2m1fn" else nibble.astype(jnp.float32)
    elif form.dtype == "float8_e4m3fn":
        wide = e4m3_in_units(wide).astype(jnp.float32) * E4M3_UNIT
    else:
        wide = wide.astype(jnp.float32)
    if form.zero or form.offset:
        wide = wide - (parts["zero"].astype(jnp.float32) if form.zero else float(form.offset))
    if form.scale:
        wide = wide * wide_scale(parts["scale"], form)
    return wide + wide_scale(parts["minimum"], form) if form.minimum else wide
