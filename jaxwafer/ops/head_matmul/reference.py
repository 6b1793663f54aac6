"""Plain JAX: write out the dequantised matrix by heads and multiply."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.quant.array import QuantizedArray, dequantize
from jaxwafer.quant.formats import Format


def objection(dtype, form: Format, platform: str, rows: int = 128) -> str | None:
    """Why this backend cannot run these inputs: never."""
    return None


def description(form: Format, quantise: bool) -> str:
    return "plain JAX"


def absorb(x: jax.Array, weight: QuantizedArray, index: jax.Array, inputs: int) -> jax.Array:
    # The matrix first: in the other order XLA's CPU compiler makes a bfloat16 product that its runtime lacks.
    matrix = _by_head(x, weight, index, inputs)
    return jnp.einsum("hnk,bthn->bthk", matrix, x, preferred_element_type=jnp.float32, precision="highest")


def expand(x: jax.Array, weight: QuantizedArray, index: jax.Array) -> jax.Array:
    matrix = _by_head(x, weight, index, x.shape[3])
    return jnp.einsum("bthk,hnk->bthn", x, matrix, preferred_element_type=jnp.float32, precision="highest")


def _by_head(x: jax.Array, weight: QuantizedArray, index: jax.Array, inputs: int) -> jax.Array:
    """A matrix of the stack, [heads, N, inputs] in x's dtype, without the padding of its groups."""
    return einops.rearrange(dequantize(weight[index], x.dtype)[..., :inputs], "(h n) k -> h n k", h=x.shape[2])
