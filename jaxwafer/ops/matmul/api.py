"""Quantised matmul, indexed into stacked weights: the signature, and the choice of a backend."""

import jax
import jax.numpy as jnp

from jaxwafer.ops import choice
from jaxwafer.ops.matmul import cpu, reference, tpu
from jaxwafer.quant.array import QuantizedArray

# Tried in order. Each module has `objection(dtype, weight_format, platform) -> str | None`, `description() -> str` and
# `matmul(x, weight, index)`. The reference objects to nothing.
BACKENDS = {"cpu": cpu, "tpu": tpu, "reference": reference}


def matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array | int = 0, *, backend: str) -> jax.Array:
    """x @ weight[index]ᵀ, accumulated in float32.

    x: [..., K] in the compute dtype (float32 or bfloat16); K may be short of the weight's padded K by padding.
    weight: a stack [S, N, K] of which one matrix is read. index: int32 scalar, clamped to the stack. backend: a key of
    `BACKENDS`, as `choose` gives it. Returns float32 [..., N].
    """
    rows = x.reshape(-1, x.shape[-1])
    out = BACKENDS[backend].matmul(rows, weight, jnp.asarray(index, jnp.int32))
    return out.reshape(*x.shape[:-1], out.shape[-1])


def choose(dtype, weight_format: str, platform: str) -> str:
    """The backend for x of `dtype` and weights of the format of this name: the first that does not object."""
    return explain(dtype, weight_format, platform)[0]


def explain(dtype, weight_format: str, platform: str) -> tuple[str, str]:
    """The backend that `choose` gives, and why: what it is, or what kept the ones before it from being taken."""
    return choice.explain(BACKENDS, dtype, weight_format, platform)


def implementation(platform: str) -> dict[str, str]:
    """{"backend", "reason"} on a platform for float32 activations; with every format named where they differ."""
    return choice.implementation(BACKENDS, platform)
