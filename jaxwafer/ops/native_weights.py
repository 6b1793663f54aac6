"""Stacks of weights as arguments of the native kernels on CPU (cpu/arguments.h)."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.model.mlp import Activation
from jaxwafer.ops import native
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

# What a stored value can be; the position is its number in the kernels.
VALUES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "int8", "uint4", "float4_e2m1fn")
# Of these, the ones that rows of x may be rounded to int8 for.
INTEGERS = ("int8", "uint4", "float4_e2m1fn")
SCALES = ("float32", "bfloat16", "float16", "float8_e8m0fnu")
BLOCK = 32
# The position is the activation's number in the kernels, from 1; 0 joins nothing.
ACTIVATIONS = ("silu", "situ", "swiglu-oai")


def objection(kernel: native.Kernel | str, form: Format, dtype, platform: str) -> str | None:
    """Why a native kernel cannot run weights of this format with x of `dtype`, or None."""
    if platform != "cpu":
        return f"not made for {platform}"
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"no kernel for {jnp.dtype(dtype).name} activations"
    known = form.dtype in VALUES and form.scale in (None, *SCALES)
    grouped = form.group is None or form.group % BLOCK == 0
    # What is stored without a sign has groups: the kernels add its offset for whole blocks.
    if not known or not grouped or (form.packed and form.group is None):
        return f"no kernel for {form.name} weights"
    return kernel if isinstance(kernel, str) else None


def description(form: Format, quantise: bool, built_with: str) -> str:
    """What runs, for reports."""
    rows = "int8" if quantise and form.dtype in INTEGERS else "float32"
    return f"C++ kernel, {rows} activations, built with {built_with}"


def arguments(weights: Sequence[QuantizedArray]) -> tuple[list[jax.Array], np.ndarray]:
    """The arrays of weights in the kernels' order, and the numbers that describe them, int64 [4 · weights]."""
    arrays, layout = [], []
    for weight in weights:
        form, parts = weight.format, (weight.scale, weight.zero, weight.minimum)
        arrays += [weight.values, *(part for part in parts if part is not None)]
        present = sum(1 << bit for bit, part in enumerate(parts) if part is not None)
        layout += [VALUES.index(form.dtype), form.group or 0, 0 if form.zero else form.offset, present]
    return arrays, np.array(layout, np.int64)


def joined(activation: Activation | None) -> dict:
    """The attributes that say how two products are joined."""
    number = 1 + ACTIVATIONS.index(activation.name) if activation else 0
    return {"join": number, "limits": np.array(activation.limits if activation else (), np.float32)}
