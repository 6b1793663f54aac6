"""On CPU: `expand` is the experts' kernel with heads for experts, `absorb` an XLA FFI kernel of its own (cpu.cc)."""

from pathlib import Path

import einops
import jax
import jax.numpy as jnp

from jaxwafer.ops import native, native_weights
from jaxwafer.ops.expert_matmul import cpu as expert_matmul
from jaxwafer.quant.array import QuantizedArray, assemble
from jaxwafer.quant.formats import Format

SOURCE = Path(__file__).with_suffix(".cc")


def objection(dtype, form: Format, platform: str, rows: int = 128) -> str | None:
    """Why this backend cannot run these inputs, or None. The first call on a CPU builds the kernels."""
    kernel = native.kernel(SOURCE, "JaxwaferAbsorb") if platform == "cpu" else ""
    return expert_matmul.objection(dtype, form, platform) or native_weights.objection(kernel, form, dtype, platform)


def description(form: Format, quantise: bool) -> str:
    """What runs, for reports; asked only where there is no objection."""
    return native_weights.description(form, False, native.kernel(SOURCE, "JaxwaferAbsorb").built_with)


def absorb(x: jax.Array, weight: QuantizedArray, index: jax.Array, inputs: int) -> jax.Array:
    target = native.kernel(SOURCE, "JaxwaferAbsorb").target
    batch, tokens, heads, _ = x.shape
    result = jax.ShapeDtypeStruct((batch * tokens, heads, inputs), jnp.float32)
    arrays, layout = native_weights.arguments([weight])
    call = jax.ffi.ffi_call(target, result, vmap_method="sequential")
    out = call(einops.rearrange(x, "b t h n -> (b t) h n"), index, *arrays, layout=layout)
    return einops.rearrange(out, "(b t) h k -> b t h k", b=batch)


def expand(x: jax.Array, weight: QuantizedArray, index: jax.Array) -> jax.Array:
    batch, tokens, heads, _ = x.shape
    parts = {name: einops.rearrange(p, "s (h n) k -> s h n k", h=heads) for name, p in weight.parts.items()}
    experts = jnp.tile(jnp.arange(heads, dtype=jnp.int32), batch * tokens)
    rows = einops.rearrange(x, "b t h k -> (b t h) k")
    out = expert_matmul.expert_matmul(rows, assemble(parts, weight.format), index, experts, heads, False)
    return einops.rearrange(out, "(b t h) n -> b t h n", b=batch, h=heads)
