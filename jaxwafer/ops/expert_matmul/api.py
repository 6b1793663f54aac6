"""Quantised matmul of rows with the matrices of their experts: the signature, and the choice of a backend."""

import jax
import jax.numpy as jnp

from jaxwafer.model.mlp import Activation
from jaxwafer.ops import choice
from jaxwafer.ops.expert_matmul import cpu, gpu, reference, tpu
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

# Tried in order. Each module has `objection(dtype, form, platform) -> str | None`, `description(form, quantise) -> str`
# and `expert_matmul(x, weight, index, experts, of, quantise)`. The reference objects to nothing.
BACKENDS = {"cpu": cpu, "gpu": gpu, "tpu": tpu, "reference": reference}


def expert_matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array | int, experts: jax.Array, *,
                  of: int, backend: str, quantise: bool = False) -> jax.Array:  # fmt: skip
    """x[r] @ weight[index, experts[r]]ᵀ for every row r, accumulated in float32; only those matrices are read.

    x: [R, K] in the compute dtype (float32 or bfloat16), in any order; K may be short of the weight's padded K by
    padding. weight: a stack [S, E, N, K]. index: int32 scalar, clamped to the stack. experts: int32 [R]; an expert
    outside 0 … E − 1 is another core's, or padding: its row is zero. of: experts on all cores, by which kernels guess
    how many of the rows are theirs. backend: a key of `BACKENDS`, as `choose` gives it. quantise: as in
    `ops.matmul.api.matmul`. Returns float32 [R, N].
    """
    return BACKENDS[backend].expert_matmul(x, weight, jnp.asarray(index, jnp.int32), experts, of, quantise)


def gated(x: jax.Array, gate: QuantizedArray, up: QuantizedArray, index: jax.Array | int, experts: jax.Array, *,
          activation: Activation, of: int, backend: str, quantise: bool = False) -> jax.Array:  # fmt: skip
    """`activation` of the products of x's rows with the gate and up matrices of their experts, zero for others'.

    x: [X, K]; experts: int32 [R], of which as many in turn belong to each row as R has of X. Returns float32 [R, N].
    """
    index = jnp.asarray(index, jnp.int32)
    arguments = x, gate, up, index, experts, activation, of, quantise
    if not hasattr(BACKENDS[backend], "gated"):
        return reference.gated(*arguments, product=BACKENDS[backend].expert_matmul)
    return BACKENDS[backend].gated(*arguments)


def choose(dtype, form: Format, platform: str) -> str:
    """The backend for x of `dtype` and weights in this format: the first that does not object."""
    return explain(dtype, form, platform)[0]


def explain(dtype, form: Format, platform: str, *, quantise: bool = False) -> tuple[str, str]:
    """The backend that `choose` gives, and why."""
    return choice.explain(BACKENDS, dtype, form, platform, quantise)


def implementation(platform: str) -> dict[str, str]:
    """{"backend", "reason"} on a platform for float32 activations; with every format named where they differ."""
    return choice.implementation(BACKENDS, platform)
