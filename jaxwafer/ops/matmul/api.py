"""Quantised matmul, indexed into stacked weights: the signatures, and the choice of a backend."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxwafer.model.mlp import Activation
from jaxwafer.ops import choice
from jaxwafer.ops.activation import activate
from jaxwafer.ops.matmul import cpu, gpu, reference, tpu
from jaxwafer.ops.norm import rms_norm
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

# Tried in order. Each module has `objection(dtype, form, platform) -> str | None`, `description(form, quantise) -> str`
# and `matmul` of x [M, K]; one that can do more at once has `project` and `gated` too. The reference objects to
# nothing.
BACKENDS = {"cpu": cpu, "gpu": gpu, "tpu": tpu, "reference": reference}


def matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array | int = 0, *, backend: str,
           quantise: bool = False) -> jax.Array:  # fmt: skip
    """x @ weight[index]ᵀ, accumulated in float32.

    x: [..., K] in the compute dtype (float32 or bfloat16); K may be short of the weight's padded K by padding.
    weight: a stack [S, N, K] of which one matrix is read. index: int32 scalar, clamped to the stack. backend: a key of
    `BACKENDS`, as `choose` gives it. quantise: x may be rounded to int8 in blocks of 32, where weights are integers or
    4-bit floats and the backend can. Returns float32 [..., N].
    """
    out = BACKENDS[backend].matmul(_rows(x), weight, jnp.asarray(index, jnp.int32), quantise)
    return out.reshape(*x.shape[:-1], out.shape[-1])


def project(x: jax.Array, norm: jax.Array, weights: Sequence[QuantizedArray], index: jax.Array | int = 0, *, eps: float,
            backend: str, quantise: bool = False) -> tuple[jax.Array, ...]:  # fmt: skip
    """`matmul` of RMSNorm(x), rounded to x's dtype, with each of several stacks of weights.

    norm: float32 [S, K], the norm's weights, of which one row is read.
    """
    if not hasattr(BACKENDS[backend], "project"):
        normed = rms_norm(x, norm[index], eps)
        return tuple(matmul(normed, weight, index, backend=backend, quantise=quantise) for weight in weights)
    out = BACKENDS[backend].project(_rows(x), norm, weights, jnp.asarray(index, jnp.int32), eps, quantise)
    return tuple(each.reshape(*x.shape[:-1], each.shape[-1]) for each in out)


def gated(x: jax.Array, norm: jax.Array | None, gate: QuantizedArray, up: QuantizedArray, index: jax.Array | int = 0, *,
          eps: float, activation: Activation, backend: str, quantise: bool = False) -> jax.Array:  # fmt: skip
    """`activation` of x's products with gate and up; x goes through RMSNorm first unless norm is None."""
    if not hasattr(BACKENDS[backend], "gated"):
        normed = x if norm is None else rms_norm(x, norm[index], eps)
        halves = (matmul(normed, weight, index, backend=backend, quantise=quantise) for weight in (gate, up))
        return activate(activation, *halves)
    out = BACKENDS[backend].gated(
        _rows(x), norm, gate, up, jnp.asarray(index, jnp.int32), eps, activation, quantise
    )  # fmt: skip
    return out.reshape(*x.shape[:-1], out.shape[-1])


def _rows(x: jax.Array) -> jax.Array:
    return x.reshape(-1, x.shape[-1])


def choose(dtype, forms: Sequence[Format], platform: str) -> str:
    """The backend for x of `dtype` and weights in these formats: the first that objects to none of them."""
    return next(name for name, b in BACKENDS.items() if not any(b.objection(dtype, form, platform) for form in forms))


def explain(dtype, form: Format, platform: str, *, quantise: bool = False) -> tuple[str, str]:
    """The backend for x of `dtype` and weights in one format, and why: what it is, or what kept the ones before it from
    being taken."""
    return choice.explain(BACKENDS, dtype, form, platform, quantise)


def implementation(platform: str) -> dict[str, str]:
    """{"backend", "reason"} on a platform for float32 activations; with every format named where they differ."""
    return choice.implementation(BACKENDS, platform)
