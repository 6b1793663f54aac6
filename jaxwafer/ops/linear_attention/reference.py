"""Plain JAX around the delta rule, whose own backend depends on the platform."""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.ops.bits import rounded
from jaxwafer.ops.causal_conv import causal_conv
from jaxwafer.ops.delta_rule import api as delta_rule
from jaxwafer.ops.linear_attention.form import Form, Projected
from jaxwafer.ops.norm import rms_norm
from jaxwafer.ops.state import State, read_state, write_state
from jaxwafer.ops.step import Step

UNIT_EPS = 1e-6


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs: never."""
    return None


def description() -> str:
    return "plain JAX"


def linear_attention(projected: Projected, weights: dict[str, jax.Array], index: jax.Array, cache: dict[str, State],
                     layer: jax.Array, slot: jax.Array, step: Step, form: Form,
                     recurrence: str) -> tuple[jax.Array, dict[str, State]]:  # fmt: skip
    cache, heads = dict(cache), {}
    for name, x, dim in (("q", projected.q, form.key_dim), ("k", projected.k, form.key_dim),
                         ("v", projected.v, form.value_dim)):  # fmt: skip
        store = cache[f"{name}_past"]
        # Rounded first, so that chunks of a prompt, however cut, read the same inputs.
        x, past = rounded(x, store.values.dtype), read_state(store, layer, jnp.maximum(slot, 0), step.start)
        y, past = causal_conv(x, past, weights[f"{name}_conv"][index][:, 0], step.count)
        heads[name] = einops.rearrange(jax.nn.silu(y), "b t (h d) -> b t h d", d=dim)
        cache[f"{name}_past"] = write_state(store, layer, slot, past)
    tokens, count = projected.beta.shape[1:]
    # Heads that share keys and queries lie beside one another.
    group = count // heads["k"].shape[2]
    q, k = (einops.repeat(unit(heads[name]), "b t h k -> b t (h group) k", group=group) for name in "qk")
    z = einops.rearrange(projected.z + weights["dt_bias"][index].reshape(1, 1, -1), "b t (h k) -> b t h k", h=count)
    g = log_decay(z, weights["a_log"][index].reshape(1, 1, -1, 1), form.lower_bound)
    # Pad tokens leave the state alone.
    real = step.real(tokens)[..., None]
    g, beta = jnp.where(real[..., None], g, 0.0), jnp.where(real, jax.nn.sigmoid(projected.beta), 0.0)
    out, cache["state"] = delta_rule.recur(
        q * form.key_dim**-0.5, k, heads["v"], g, beta, cache["state"], layer, slot, step.start, backend=recurrence
    )
    normed = einops.rearrange(rms_norm(out, weights["o_norm"][index], form.eps), "b t h d -> b t (h d)")
    act = {"sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu}[form.gate]
    return (normed * act(projected.gate.astype(jnp.float32))).astype(projected.gate.dtype), cache


def unit(x: jax.Array) -> jax.Array:
    """x / √(Σ x² + 1e-6) over the last axis."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + UNIT_EPS)


def log_decay(z: jax.Array, a_log: jax.Array, lower_bound: float | None) -> jax.Array:
    """g ≤ 0 of z [B, T, H, K] with a_log [1, 1, H, 1], as `Form` says."""
    rate = jnp.exp(a_log)
    if lower_bound is not None:
        return lower_bound * jax.nn.sigmoid(rate * z)
    return -rate * jax.nn.softplus(z)
