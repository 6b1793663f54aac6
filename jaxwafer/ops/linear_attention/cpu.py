"""XLA FFI kernel on CPU (cpu.cc) for one token, which updates the cache where it lies; more go through plain JAX."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.ops import native
from jaxwafer.ops.linear_attention import reference
from jaxwafer.ops.linear_attention.form import VECTORS, Form, Projected
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step

SOURCE = Path(__file__).with_suffix(".cc")
FIELDS = ("state", "q_past", "k_past", "v_past")


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None. The first call on a CPU builds the kernel."""
    if platform != "cpu":
        return f"not made for {platform}"
    kernel = native.kernel(SOURCE, "JaxwaferLinearAttention")
    return kernel if isinstance(kernel, str) else None


def description() -> str:
    """What runs, for reports; asked only where there is no objection."""
    return f"C++ kernel for a token, built with {native.kernel(SOURCE, 'JaxwaferLinearAttention').built_with}"


def linear_attention(projected: Projected, weights: dict[str, jax.Array], index: jax.Array, cache: dict[str, State],
                     layer: jax.Array, slot: jax.Array, step: Step, form: Form,
                     recurrence: str) -> tuple[jax.Array, dict[str, State]]:  # fmt: skip
    if projected.gate.shape[1] != 1:
        return reference.linear_attention(projected, weights, index, cache, layer, slot, step, form, recurrence)
    p = projected
    rows = [x[:, 0].astype(jnp.float32) for x in (p.q, p.k, p.v, p.z, p.beta, p.gate)]
    vectors = [weights[name].reshape(len(weights[name]), -1) for name in VECTORS]
    before = [index, layer, slot, step.start]
    stored = [cache[name].values for name in FIELDS]
    first = len(rows) + len(vectors) + len(before)
    out = jax.ShapeDtypeStruct(rows[-1].shape, jnp.float32)
    call = jax.ffi.ffi_call(
        native.kernel(SOURCE, "JaxwaferLinearAttention").target,
        [out, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in stored)],
        input_output_aliases={first + i: 1 + i for i in range(len(FIELDS))},
        vmap_method="sequential",
    )
    out, *updated = call(*rows, *vectors, *before, *stored, eps=np.float32(form.eps), silu=form.gate == "silu",
                         bound=np.float32(np.nan if form.lower_bound is None else form.lower_bound))  # fmt: skip
    states = {name: State(values=values) for name, values in zip(FIELDS, updated, strict=True)}
    return out[:, None].astype(p.gate.dtype), cache | states
