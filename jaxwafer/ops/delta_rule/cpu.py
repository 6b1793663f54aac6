"""XLA FFI kernel on CPU (cpu.cc) for one token, which updates the state where it lies; more go in chunks, in plain
JAX."""

from pathlib import Path

import jax
import jax.numpy as jnp

from jaxwafer.ops import native
from jaxwafer.ops.delta_rule import reference
from jaxwafer.ops.state import State

SOURCE = Path(__file__).with_suffix(".cc")


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None. The first call on a CPU builds the kernel."""
    if platform != "cpu":
        return f"not made for {platform}"
    kernel = native.kernel(SOURCE, "JaxwaferDeltaStep")
    return kernel if isinstance(kernel, str) else None


def description() -> str:
    """What runs, for reports; asked only where there is no objection."""
    return f"C++ kernel for a step, built with {native.kernel(SOURCE, 'JaxwaferDeltaStep').built_with}"


def recur(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: State, layer: jax.Array,
          slot: jax.Array, start: jax.Array) -> tuple[jax.Array, State]:  # fmt: skip
    if q.shape[1] != 1:
        return reference.recur(q, k, v, g, beta, state, layer, slot, start)
    stored = state.values
    shapes = [jax.ShapeDtypeStruct(v[:, 0].shape, jnp.float32), jax.ShapeDtypeStruct(stored.shape, stored.dtype)]
    call = jax.ffi.ffi_call(
        native.kernel(SOURCE, "JaxwaferDeltaStep").target, shapes, input_output_aliases={8: 1},
        vmap_method="sequential",
    )  # fmt: skip
    each = (x[:, 0] for x in (q, k, v, g, beta))
    out, values = call(*each, jnp.asarray(layer, jnp.int32), slot, start, stored)
    return out[:, None], State(values=values)
