"""What the linear-attention mixers share: convolved heads, unit keys and queries, the recurrence, the gated norm."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.ops.bits import rounded
from jaxwafer.ops.norm import rms_norm
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


def inputs(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, step: Step) -> dict:
    """What the delta rule takes, shapes as in `ops.delta_rule.api`: unit keys and queries, the latter scaled; pad
    tokens leave the state alone."""
    real = step.real(q.shape[1])[..., None]
    g, beta = jnp.where(real[..., None], g, 0.0), jnp.where(real, beta, 0.0)
    return {"q": unit(q) * q.shape[-1] ** -0.5, "k": unit(k), "v": v, "g": g, "beta": beta}


def advance(layer: jax.Array, carry: dict, cache: dict[str, State], slot: jax.Array, step: Step,
            ops: Operations) -> tuple[dict, dict[str, State]]:  # fmt: skip
    """The delta rule from and to each request's state in the cache, at `slot`, where that is not negative."""
    carry = dict(carry)
    taken = [carry.pop(name) for name in ("q", "k", "v", "g", "beta")]
    out, state = ops.recur(*taken, cache["state"], layer, slot, step.start)
    return carry | {"out": out}, cache | {"state": state}


def gated_norm(o: jax.Array, gate: jax.Array, weight: jax.Array, eps: float, dtype) -> jax.Array:
    """RMSNorm of each head of o [B, T, H, V] times gate [B, T, H · V], in `dtype` [B, T, H · V]."""
    normed = einops.rearrange(rms_norm(o, weight, eps), "b t h d -> b t (h d)")
    return (normed * gate.astype(jnp.float32)).astype(dtype)
