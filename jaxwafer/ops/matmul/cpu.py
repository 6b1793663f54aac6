"""XLA FFI kernel on CPU (cpu.cc): weights are widened to float32 as they are read; activations are not quantised."""

from pathlib import Path

import jax
import jax.numpy as jnp

from jaxwafer.ops import native
from jaxwafer.quant.array import QuantizedArray

PLATFORMS = ("cpu",)
# Names of the formats that cpu_formats.h unpacks.
KNOWN = frozenset(("f32", "bf16", "f16", "fp8", "int8", "int8-g32", "int4", "int4-min"))
SOURCE = Path(__file__).with_suffix(".cc")


def objection(dtype, weight_format: str, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None. The first call on a CPU builds the kernel."""
    if platform not in PLATFORMS:
        return f"not made for {platform}"
    if weight_format not in KNOWN:
        return f"no kernel for {weight_format} weights"
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"no kernel for {jnp.dtype(dtype).name} activations"
    built = native.kernel(SOURCE, "JaxwaferMatmul")
    return built if isinstance(built, str) else None


def description() -> str:
    """What runs, for reports; asked only where there is no objection."""
    return f"C++ kernel built with {native.kernel(SOURCE, 'JaxwaferMatmul').built_with}"


def matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array) -> jax.Array:
    """x: [M, K] float32 or bfloat16. An index outside the stack is clamped. Returns float32 [M, N]; no gradient."""
    target = native.kernel(SOURCE, "JaxwaferMatmul").target
    result = jax.ShapeDtypeStruct((x.shape[0], weight.values.shape[1]), jnp.float32)
    parts = [p for p in (weight.values, weight.scale, weight.minimum) if p is not None]
    call = jax.ffi.ffi_call(target, result, vmap_method="sequential")
    return call(x, index, *parts, format=weight.format.name)
