"""The dense gated MLP on one core's columns, and the activations that MLPs share."""

import jax
import jax.numpy as jnp

from jaxwafer.layers.norm import rms_norm
from jaxwafer.model.mlp import Activation, DenseMLP
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.step import Step


def dense_mlp(kind: DenseMLP, weights: dict, layer: jax.Array, x: jax.Array, step: Step, ops: Operations):
    """MLP of x [B, T, hidden] in layer `layer` of the stack: this core's partial sum, and no experts touched."""
    normed = rms_norm(x, weights["norm"][layer], kind.eps)
    gate = ops.matmul(normed, weights["gate"], layer)
    up = ops.matmul(normed, weights["up"], layer)
    joined = activate(kind.activation, gate, up).astype(x.dtype)
    return ops.matmul(joined, weights["down"], layer), jnp.zeros((), jnp.float32)


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
