"""What the linear-attention mixers share: convolved heads, unit keys and queries, the recurrence, the gated norm."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.layers.norm import rms_norm
from jaxwafer.ops.bits import rounded
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.state import State, read_state
from jaxwafer.ops.step import Step

UNIT_EPS = 1e-6


def convolve(name: str, x: jax.Array, dim: int, weights: dict, layer: jax.Array, step: Step, cache: dict[str, State],
             ops: Operations) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Heads of SiLU(convolution of x [B, T, C]), float32 [B, T, C / dim, dim], and the inputs to keep of `name`.

    x is rounded to what the cache keeps, so that chunks of a prompt, however cut, read the same inputs.
    """
    store = cache[f"{name}_past"]
    past = read_state(store, layer, step.slot, step.start)
    x = rounded(x, store.values.dtype)
    y, past = ops.causal_conv(x, past, weights[f"{name}_conv"][layer][:, 0], step.count)
    return einops.rearrange(jax.nn.silu(y), "b t (h d) -> b t h d", d=dim), past


def unit(x: jax.Array) -> jax.Array:
    """x / √(Σ x² + 1e-6) over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + UNIT_EPS)


def recur(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, layer: jax.Array, step: Step,
          cache: dict[str, State], ops: Operations) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The delta rule from the request's state, with unit keys and queries: o [B, T, H, V] and the new state.

    Shapes as in `ops.delta_rule.api`; q and k are scaled here, and pad tokens leave the state alone.
    """
    real = step.real(q.shape[1])[..., None]
    state = read_state(cache["state"], layer, step.slot, step.start)
    g, beta = jnp.where(real[..., None], g, 0.0), jnp.where(real, beta, 0.0)
    return ops.delta_rule(unit(q) * q.shape[-1] ** -0.5, unit(k), v, g, beta, state)


def gated_norm(o: jax.Array, gate: jax.Array, weight: jax.Array, eps: float, dtype) -> jax.Array:
    """RMSNorm of each head of o [B, T, H, V] times gate [B, T, H · V], in `dtype` [B, T, H · V]."""
    normed = einops.rearrange(rms_norm(o, weight, eps), "b t h d -> b t (h d)")
    return (normed * gate.astype(jnp.float32)).astype(dtype)
