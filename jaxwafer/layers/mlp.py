"""The dense gated MLP on one core's columns."""

import jax
import jax.numpy as jnp

from jaxwafer.model.mlp import DenseMLP
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.step import Step


def dense_mlp(kind: DenseMLP, weights: dict, layer: jax.Array, x: jax.Array, step: Step, ops: Operations):
    """MLP of x [B, T, hidden] in layer `layer` of the stack: this core's partial sum, and no experts touched."""
    gate, up = weights["gate"], weights["up"]
    joined = ops.gated(x, weights["norm"], gate, up, layer, eps=kind.eps, activation=kind.activation)
    return ops.matmul(joined.astype(x.dtype), weights["down"], layer), jnp.zeros((), jnp.float32)
