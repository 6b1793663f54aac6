"""XLA FFI kernel on CPU (cpu.cc): an online softmax over the live tokens of each request, in float32."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.ops import native
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step

SOURCE = Path(__file__).with_suffix(".cc")


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None. The first call on a CPU builds the kernel."""
    if platform != "cpu":
        return f"not made for {platform}"
    if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
        return f"no kernel for {jnp.dtype(dtype).name} activations"
    kernel = native.kernel(SOURCE, "JaxwaferAttention")
    return kernel if isinstance(kernel, str) else None


def description() -> str:
    """What runs, for reports; asked only where there is no objection."""
    return f"C++ kernel built with {native.kernel(SOURCE, 'JaxwaferAttention').built_with}"


def paged_attention(q: jax.Array, k: Pages, v: Pages, layer: jax.Array, step: Step, *, scale: float,
                    window: int | None, sinks: jax.Array | None) -> jax.Array:  # fmt: skip
    arrays = [*_arrays(k), *_arrays(v), *([] if sinks is None else [sinks])]
    shapes = [jax.ShapeDtypeStruct(q.shape, jnp.float32)]
    (out,) = _call(q, layer, step, jnp.zeros((), jnp.int32), arrays, shapes, scale=scale, window=window or 0, rank=0,
                   scaled=k.exponent is not None, sunk=sinks is not None)  # fmt: skip
    return out


def latent_attention(q: jax.Array, latent: Pages, layer: jax.Array, step: Step, *, rank: int, scale: float,
                     first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    each = jax.ShapeDtypeStruct(q.shape[:-1], jnp.float32)
    shapes = [each, each, jax.ShapeDtypeStruct((*q.shape[:-1], rank), jnp.float32)]
    out = _call(q, layer, step, first, _arrays(latent), shapes, scale=scale, window=0, rank=rank,
                scaled=latent.exponent is not None, sunk=False)  # fmt: skip
    return tuple(out)


def _arrays(pages: Pages) -> list[jax.Array]:
    return [pages.values, *([] if pages.exponent is None else [pages.exponent])]


def _call(q: jax.Array, layer: jax.Array, step: Step, first: jax.Array, arrays: list[jax.Array], shapes: list, *,
          scale: float, **attributes) -> list[jax.Array]:  # fmt: skip
    call = jax.ffi.ffi_call(native.kernel(SOURCE, "JaxwaferAttention").target, shapes, vmap_method="sequential")
    return call(q, jnp.asarray(layer, jnp.int32), step.start, step.count, step.table, first, *arrays,
                scale=np.float32(scale), **attributes)  # fmt: skip
