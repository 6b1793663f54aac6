"""Stored numbers as float32 by arithmetic on their bits, for kernels whose compilers lack the narrow types."""

import jax
import jax.numpy as jnp

from jaxwafer.quant.formats import Format


def bits(part: jax.Array) -> jax.Array:
    """An array of a dtype that Mosaic lacks as its bits."""
    lacking = {jnp.dtype(jnp.float16): jnp.uint16, jnp.dtype(jnp.float8_e8m0fnu): jnp.uint8}
    stored = lacking.get(part.dtype)
    return part if stored is None else jax.lax.bitcast_convert_type(part, stored)


def wide_scale(scale: jax.Array, form: Format) -> jax.Array:
    """Scales as float32."""
    if form.scale == "float16":
        wide = scale.astype(jnp.int32)
        # Sign, and exponent and mantissa moved to where float32 has them, short of the difference of the two biases.
        moved = ((wide & 0x8000) << 16) | ((wide & 0x7FFF) << 13)
        return jax.lax.bitcast_convert_type(moved, jnp.float32) * jnp.float32(2.0**112)
    if form.scale == "float8_e8m0fnu":
        return jax.lax.bitcast_convert_type(scale.astype(jnp.int32) << 23, jnp.float32)
    return scale.astype(jnp.float32)


def e2m1(nibble: jax.Array) -> jax.Array:
    """The values of `quant.formats.E2M1`, by arithmetic: sign, two bits of exponent, one of mantissa."""
    exponent, mantissa = (nibble >> 1) & 3, (nibble & 1).astype(jnp.float32)
    power = (1 << jnp.maximum(exponent - 1, 0)).astype(jnp.float32)
    size = jnp.where(exponent == 0, 0.5 * mantissa, (1.0 + 0.5 * mantissa) * power)
    return jnp.where(nibble >= 8, -size, size)


def e4m3(bits: jax.Array) -> jax.Array:
    """The float32 of int32 bits of e4m3 numbers; NaN becomes 480."""
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    normal = jax.lax.bitcast_convert_type(((exponent + 120) << 23) | (mantissa << 20), jnp.float32)
    size = jnp.where(exponent == 0, mantissa.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where(bits >= 128, -size, size)
