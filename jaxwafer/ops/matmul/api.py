"""Quantised matmul, indexed into stacked weights: the signature, and the choice of a backend."""

import jax
import jax.numpy as jnp

from jaxwafer.ops.matmul import reference
from jaxwafer.quant.array import QuantizedArray

# Tried in order; each module has `supports(x, weight, platform) -> bool` and `matmul(x, weight, index)`.
BACKENDS = {"reference": reference}


def matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array | int = 0, *, backend: str) -> jax.Array:
    """x @ weight[index]ᵀ, accumulated in float32.

    x: [..., K] in the compute dtype (float32 or bfloat16). weight: a stack [S, N, K] of which one matrix is read.
    index: int32 scalar. backend: a key of `BACKENDS`. Returns float32 [..., N].
    """
    rows = x.reshape(-1, x.shape[-1])
    out = BACKENDS[backend].matmul(rows, weight, jnp.asarray(index, jnp.int32))
    return out.reshape(*x.shape[:-1], out.shape[-1])
