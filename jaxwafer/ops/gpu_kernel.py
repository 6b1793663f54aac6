"""What Pallas kernels for GPUs share, which Triton compiles."""

import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton

from jaxwafer.ops.bits import NUMBERS, stored_as

# The custom call that Triton's kernels become in a lowered program.
KERNEL = "__gpu$xla.gpu.triton"
# Numbers of e4m3 are float16 of this part of their size, which costs nothing but moving their bits.
E4M3_UNIT = 2.0**8


def objection_to(platform: str) -> str | None:
    """Why no kernel for GPUs runs on a platform, or None."""
    return None if platform == "gpu" else f"not made for {platform}"


def reachable(shape: tuple[int, ...], dtype) -> bool:
    """Whether a kernel can address an array. An offset into up to 4 GiB is a signed number of 32 bits, which as many
    elements of one byte overflow from the middle on; beyond, it has 64."""
    size = math.prod(shape)
    return size * jnp.dtype(dtype).itemsize > 1 << 32 or size <= 1 << 31


def layers_reachable(stack) -> bool:
    """Whether `within_reach` has something to give for a pytree of arrays [layers, …] with `values`."""
    shape, dtype = stack.values.shape, stack.values.dtype
    return reachable(shape, dtype) or reachable(shape[1:], dtype)


def within_reach(stack, layer: jax.Array):
    """A pytree of arrays [layers, …], of which `values` is the largest, and the index of a layer in it; that layer
    alone, copied, where a kernel cannot address all."""
    if reachable(stack.values.shape, stack.values.dtype):
        return stack, layer
    one = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, layer), stack)
    return one, jnp.zeros_like(layer)


def as_bits(array: jax.Array) -> jax.Array:
    """An array of a narrow float as whole numbers, as the cache is stored."""
    stored = stored_as(array.dtype)
    return array if stored == array.dtype else jax.lax.bitcast_convert_type(array, stored)


def load(ref, index: tuple, inside: jax.Array) -> jax.Array:
    """ref[index], zero where not `inside`, of which nothing is read. The shapes of `index` go together."""
    return triton.load(ref.at[index], mask=inside, other=0)


def from_stored(stored: jax.Array) -> jax.Array:
    """The numbers of an array as stored, in a float that holds them; those of e4m3 in units of E4M3_UNIT."""
    number = NUMBERS.get(stored.dtype)
    if number == jnp.float8_e4m3fn:
        return e4m3_in_units(stored)
    return stored if number is None else jax.lax.bitcast_convert_type(stored, number)


def e4m3_in_units(stored: jax.Array) -> jax.Array:
    """float16 of the uint8 bits of e4m3 numbers, divided by E4M3_UNIT: exact, and any GPU can. NaN becomes 480."""
    wide = stored.astype(jnp.uint16)
    return jax.lax.bitcast_convert_type(((wide & 0x80) << 8) | ((wide & 0x7F) << 7), jnp.float16)
