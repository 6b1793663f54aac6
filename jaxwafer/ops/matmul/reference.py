"""Plain JAX: write out the dequantised matrix and multiply. The oracle for every other backend."""

import jax
import jax.numpy as jnp

from jaxwafer.quant.array import QuantizedArray, dequantize
from jaxwafer.quant.formats import Format


def objection(dtype, form: Format, platform: str) -> str | None:
    """Why this backend cannot run these inputs: never."""
    return None


def description(form: Format, quantise: bool) -> str:
    return "plain JAX"


def matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array, quantise: bool) -> jax.Array:
    """x: [M, K]. The matrix is rounded to the dtype of x before it is multiplied. Returns float32 [M, N]."""
    matrix = dequantize(weight[index], x.dtype)
    pad = matrix.shape[-1] - x.shape[-1]
    if pad:
        x = jnp.pad(x, ((0, 0), (0, pad)))
    return jnp.einsum("mk,nk->mn", x, matrix, preferred_element_type=jnp.float32, precision="highest")
