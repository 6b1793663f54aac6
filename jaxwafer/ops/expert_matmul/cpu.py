"""XLA FFI kernel on CPU (cpu.cc): the chunks of the dense product, for each chosen expert and its rows."""

from pathlib import Path

import jax
import jax.numpy as jnp

from jaxwafer.model.mlp import Activation
from jaxwafer.ops import native, native_weights
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

SOURCE = Path(__file__).with_suffix(".cc")


def objection(dtype, form: Format, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None. The first call on a CPU builds the kernel."""
    kernel = native.kernel(SOURCE, "JaxwaferExpertMatmul") if platform == "cpu" else ""
    return native_weights.objection(kernel, form, dtype, platform)


def description(form: Format, quantise: bool) -> str:
    """What runs, for reports; asked only where there is no objection."""
    built = native.kernel(SOURCE, "JaxwaferExpertMatmul").built_with
    return native_weights.description(form, quantise, built)


def expert_matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array, experts: jax.Array,
                  of: int, quantise: bool) -> jax.Array:  # fmt: skip
    return _call(x, [weight], index, experts, None, quantise)


def gated(x: jax.Array, gate: QuantizedArray, up: QuantizedArray, index: jax.Array, experts: jax.Array,
          activation: Activation, of: int, quantise: bool) -> jax.Array:  # fmt: skip
    return _call(x, [gate, up], index, experts, activation, quantise)


def _call(x: jax.Array, weights: list[QuantizedArray], index: jax.Array, experts: jax.Array,
          activation: Activation | None, quantise: bool) -> jax.Array:  # fmt: skip
    target = native.kernel(SOURCE, "JaxwaferExpertMatmul").target
    result = jax.ShapeDtypeStruct((experts.shape[0], weights[0].values.shape[2]), jnp.float32)
    arrays, layout = native_weights.arguments(weights)
    call = jax.ffi.ffi_call(target, result, vmap_method="sequential")
    joined = native_weights.joined(activation)
    return call(x, index, experts, *arrays, layout=layout, quantise=quantise, **joined)
