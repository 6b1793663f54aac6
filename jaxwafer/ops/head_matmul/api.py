"""Each head's vector times its own rows of a quantised matrix, as latent attention has it: the signatures."""

import jax
import jax.numpy as jnp

from jaxwafer.ops import choice
from jaxwafer.ops.head_matmul import cpu, reference, tpu
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

# Tried in order. Each module has `objection(dtype, form, platform, rows) -> str | None`, `description(form,
# quantise) -> str` and the operations below. The reference objects to nothing.
BACKENDS = {"cpu": cpu, "tpu": tpu, "reference": reference}


def absorb(x: jax.Array, weight: QuantizedArray, index: jax.Array, inputs: int, *, backend: str) -> jax.Array:
    """x[b, t, h] [N] @ W_h [N, K], where W_h are the rows of weight[index] [H·N, K] from h·N on.

    x: [B, T, H, N] in the compute dtype. index: int32 scalar. inputs: K without the padding of the weight's groups.
    Returns float32 [B, T, H, K].
    """
    return BACKENDS[backend].absorb(x, weight, jnp.asarray(index, jnp.int32), inputs)


def expand(x: jax.Array, weight: QuantizedArray, index: jax.Array, *, backend: str) -> jax.Array:
    """x[b, t, h] [K] @ W_hᵀ [K, N]: x [B, T, H, K] → float32 [B, T, H, N]; W_h as in `absorb`."""
    return BACKENDS[backend].expand(x, weight, jnp.asarray(index, jnp.int32))


def choose(dtype, form: Format, rows: int, platform: str) -> str:
    """The backend for x of `dtype` and a weight in this format with so many rows a head: the first that does not
    object."""
    return next(name for name, backend in BACKENDS.items() if not backend.objection(dtype, form, platform, rows))


def implementation(platform: str) -> dict[str, str]:
    """{"backend", "reason"} on a platform for float32 activations; with every format named where they differ."""
    return choice.implementation(BACKENDS, platform)
