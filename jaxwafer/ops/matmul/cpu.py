"""XLA FFI kernel on CPU (cpu.cc): weights are unpacked as they are read, rows of x shared by several matrices."""

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.model.mlp import Activation
from jaxwafer.ops import native, native_weights
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

SOURCE = Path(__file__).with_suffix(".cc")


def objection(dtype, form: Format, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None. The first call on a CPU builds the kernel."""
    kernel = native.kernel(SOURCE, "JaxwaferMatmul") if platform == "cpu" else ""
    return native_weights.objection(kernel, form, dtype, platform)


def description(form: Format, quantise: bool) -> str:
    """What runs, for reports; asked only where there is no objection."""
    return native_weights.description(form, quantise, native.kernel(SOURCE, "JaxwaferMatmul").built_with)


def matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array, quantise: bool) -> jax.Array:
    """x: [M, K] float32 or bfloat16. An index outside the stack is clamped. Returns float32 [M, N]; no gradient."""
    (out,) = _call(x, None, (weight,), index, quantise=quantise)
    return out


def project(x: jax.Array, norm: jax.Array, weights: Sequence[QuantizedArray], index: jax.Array, eps: float,
            quantise: bool) -> list[jax.Array]:  # fmt: skip
    return _call(x, norm, weights, index, eps=eps, quantise=quantise)


def gated(x: jax.Array, norm: jax.Array | None, gate: QuantizedArray, up: QuantizedArray, index: jax.Array, eps: float,
          activation: Activation, quantise: bool) -> jax.Array:  # fmt: skip
    (out,) = _call(x, norm, (gate, up), index, eps=eps, activation=activation, quantise=quantise)
    return out


def _call(x: jax.Array, norm: jax.Array | None, weights: Sequence[QuantizedArray], index: jax.Array, *,
          quantise: bool, eps: float = 0.0, activation: Activation | None = None) -> list[jax.Array]:  # fmt: skip
    target = native.kernel(SOURCE, "JaxwaferMatmul").target
    shapes = [jax.ShapeDtypeStruct((x.shape[0], w.values.shape[1]), jnp.float32) for w in weights]
    arrays, layout = native_weights.arguments(weights)
    call = jax.ffi.ffi_call(target, shapes[:1] if activation else shapes, vmap_method="sequential")
    return call(
        x, index, *([] if norm is None else [norm]), *arrays, layout=layout, quantise=quantise,
        normed=norm is not None, eps=np.float32(eps), **native_weights.joined(activation),
    )  # fmt: skip
