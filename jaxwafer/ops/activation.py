"""How the two halves of a gated MLP are joined."""

import jax
import jax.numpy as jnp

from jaxwafer.model.mlp import Activation


def activate(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """gate and up joined as `Activation` describes; float32."""
    if activation.name == "silu":
        return jax.nn.silu(gate) * up
    if activation.name == "situ":
        a, b = activation.limits
        return a * jnp.tanh(gate / a) * jax.nn.sigmoid(gate) * b * jnp.tanh(up / b)
    if activation.name == "swiglu-oai":
        (limit,) = activation.limits
        gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1.0)
    raise ValueError(f"unknown activation {activation.name!r}")
