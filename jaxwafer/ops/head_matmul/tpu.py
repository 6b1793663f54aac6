"""Pallas kernels for TPUs: a grid step is a head and a tile of tokens, with the parts of the dense product.

`absorb` sums over the rows of the weight, so that the halves of packed inputs are outputs of their own there.
"""

from functools import partial

import einops
import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.matmul.tpu import PLATFORMS, ROWS, arrays, cost, dot, objection_to, product, split, widened
from jaxwafer.ops.widen import wide_scale
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

# Scales have outputs along the lanes, and a head has whole tiles of them.
LANES = 128


def objection(dtype, form: Format, platform: str, rows: int = LANES) -> str | None:
    """Why this backend cannot run these inputs, or None."""
    if platform in PLATFORMS and rows % LANES:
        return f"no TPU kernel for heads of {rows} rows"
    return objection_to(form, platform)


def description(form: Format, quantise: bool) -> str:
    return "Pallas kernel"


def absorb(x: jax.Array, weight: QuantizedArray, index: jax.Array, inputs: int) -> jax.Array:
    rows, shape = einops.rearrange(x, "b t h n -> h (b t) n"), x.shape
    halves = 2 if weight.format.packed else 1
    found = _call(_absorb, (rows,), weight, index, [weight.values.shape[-1]] * halves)
    # The halves are the even and the odd of the weight's inputs.
    joined = einops.rearrange(jnp.stack(found, axis=-1), "h m k two -> h m (k two)")
    return einops.rearrange(joined[..., :inputs], "h (b t) k -> b t h k", b=shape[0])


def expand(x: jax.Array, weight: QuantizedArray, index: jax.Array) -> jax.Array:
    heads, outputs = x.shape[2], weight.values.shape[-2]
    flat = split(einops.rearrange(x, "b t h k -> (h b t) k"), weight)
    rows = tuple(einops.rearrange(half, "(h m) k -> h m k", h=heads) for half in flat)
    (out,) = _call(_expand, rows, weight, index, [outputs // heads])
    return einops.rearrange(out, "h (b t) n -> b t h n", b=x.shape[0])


def _call(kernel, rows: tuple[jax.Array, ...], weight: QuantizedArray, index: jax.Array, widths: list[int]):
    """kernel of each head's rows [M, …] and its part of weight[index] → float32 [H, M, width] for each of `widths`."""
    heads, tokens, _ = rows[0].shape
    values, *scales = arrays(weight)
    count, tile = values.shape[0], min(tokens, ROWS)
    own = values.shape[1] // heads
    layer = jnp.clip(index, 0, count - 1).reshape(1)

    def of_tokens(h, m, layer):
        return h, m, 0

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(heads, pl.cdiv(tokens, tile)),
        in_specs=[
            *(pl.BlockSpec((None, tile, r.shape[2]), of_tokens) for r in rows),
            pl.BlockSpec((None, own, values.shape[2]), lambda h, m, layer: (layer[0], h, 0)),
            *(pl.BlockSpec((None, scale.shape[1], own), lambda h, m, layer: (layer[0], 0, h)) for scale in scales),
        ],
        out_specs=[pl.BlockSpec((None, tile, width), of_tokens) for width in widths],
    )
    call = pl.pallas_call(
        partial(kernel, weight.format, len(rows), tuple(weight.parts)[1:]),
        out_shape=[jax.ShapeDtypeStruct((heads, tokens, width), jnp.float32) for width in widths],
        grid_spec=grid,
        cost_estimate=cost(rows, (values, *scales), count, heads * tokens, sum(widths), 1),
    )
    return call(layer, *rows, values, *scales)


def _absorb(form: Format, halves: int, names: tuple[str, ...], layer, x, values, *refs):
    scales, outs = dict(zip(names, (r[...] for r in refs), strict=False)), refs[len(names) :]
    rows = x[...]
    if form.scale and not form.group:
        rows = (rows.astype(jnp.float32) * wide_scale(scales["scale"], form)).astype(rows.dtype)
    for out, wide in zip(outs, widened(form, values[...], scales), strict=True):
        out[...] = dot(rows, wide.astype(rows.dtype), (1, 0))


def _expand(form: Format, halves: int, names: tuple[str, ...], layer, *refs):
    x, (values, *scales), out = refs[:halves], refs[halves:-1], refs[-1]
    wide = {name: s[...] for name, s in zip(names, scales, strict=True)}
    out[...] = product(form, [half[...] for half in x], values[...], wide)
