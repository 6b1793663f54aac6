"""Rows of the paged KV cache, in float or in FP8 with a power-of-two scale a head."""

import flax.struct
import jax
import jax.numpy as jnp

from jaxwafer.ops.bits import from_bits, to_bits
from jaxwafer.quant.formats import E4M3_MAX


@flax.struct.dataclass
class Pages:
    """Rows of one cache field (such as k) for a stack of layers.

    values: [layers, blocks, block, heads, head_dim], stored as `ops.bits` says. exponent: int8 [layers, blocks, block,
    heads] for FP8, whose rows are values · 2^exponent; otherwise None. A power of two costs one byte and loses nothing
    but range.
    """

    values: jax.Array
    exponent: jax.Array | None

    @property
    def block(self) -> int:
        return self.values.shape[2]

    @property
    def blocks(self) -> int:
        return self.values.shape[1]


def read(pages: Pages, layer: jax.Array, blocks: jax.Array, dtype) -> jax.Array:
    """Rows of `blocks`, int32 [B, n], as `dtype` [B, n·block, heads, head_dim]."""
    values = from_bits(pages.values[layer, blocks]).astype(dtype)
    if pages.exponent is not None:
        scale = power_of_two(pages.exponent[layer, blocks]).astype(dtype)
        values = values * scale[..., None]
    batch, count, block, heads, dim = values.shape
    return values.reshape(batch, count * block, heads, dim)


def as_stored(pages: Pages, rows: jax.Array) -> tuple[jax.Array, jax.Array | None]:
    """Rows [..., head_dim] as `pages` keeps them: values, and exponents [...] or None."""
    if pages.exponent is None:
        return to_bits(rows, pages.values.dtype), None
    scaled, exponent = to_fp8(rows)
    return to_bits(scaled, pages.values.dtype), exponent


def to_fp8(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rows [..., head_dim] as e4m3 values and int8 exponents [...], with the smallest 2^e for which all |values| ≤ 448.

    Infinities are clipped to the largest value; the conversion itself would give NaN.
    """
    rows = rows.astype(jnp.float32)
    largest = jnp.minimum(jnp.max(jnp.abs(rows), axis=-1), jnp.finfo(jnp.float32).max)
    mantissa, exponent = jnp.frexp(largest)
    # 448 = 0.875 · 2^9
    exponent = jnp.clip(exponent - 9 + (mantissa > E4M3_MAX / 512).astype(exponent.dtype), -120, 120)
    scaled = rows * power_of_two(-exponent)[..., None]
    return jnp.clip(scaled, -E4M3_MAX, E4M3_MAX).astype(jnp.float8_e4m3fn), exponent.astype(jnp.int8)


def power_of_two(exponent: jax.Array) -> jax.Array:
    """2^exponent for whole exponents from −126 to 127, float32: exact, which `jnp.exp2` is not on every platform."""
    return jax.lax.bitcast_convert_type((exponent.astype(jnp.int32) + 127) << 23, jnp.float32)
