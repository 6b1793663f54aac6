"""Narrow floats kept as the bits of their numbers.

On CPUs XLA writes into an array of a narrow float by converting all of it to float32 and back: a copy of the whole
cache for every row. An array of whole numbers is written in place, and its bits are the same.
"""

import jax
import jax.numpy as jnp

# dtype of the stored bits → the numbers that they are
NUMBERS = {jnp.dtype(jnp.uint8): jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.uint16): jnp.dtype(jnp.bfloat16)}


def stored_as(dtype) -> jnp.dtype:
    """The dtype in which arrays of `dtype` are stored."""
    return next((bits for bits, number in NUMBERS.items() if number == dtype), jnp.dtype(dtype))


def to_bits(x: jax.Array, stored) -> jax.Array:
    """x, rounded to the numbers that an array of dtype `stored` holds, as that dtype."""
    number = NUMBERS.get(jnp.dtype(stored))
    return x.astype(stored) if number is None else jax.lax.bitcast_convert_type(x.astype(number), stored)


def from_bits(stored: jax.Array) -> jax.Array:
    """The numbers of a stored array."""
    number = NUMBERS.get(stored.dtype)
    return stored if number is None else jax.lax.bitcast_convert_type(stored, number)


def rounded(x: jax.Array, stored) -> jax.Array:
    """x as an array of dtype `stored` gives it back, in float32."""
    return from_bits(to_bits(x, stored)).astype(jnp.float32)
