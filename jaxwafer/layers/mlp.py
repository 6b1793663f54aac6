"""The dense gated MLP on one core's columns."""

import jax

from jaxwafer.layers.norm import rms_norm
from jaxwafer.model.kinds import DenseMLP
from jaxwafer.ops.operations import Operations


def dense_mlp(kind: DenseMLP, weights: dict, layer: jax.Array, x: jax.Array, ops: Operations) -> jax.Array:
    """MLP of x [B, T, hidden] in layer `layer` of the stack: this core's partial sum, float32."""
    normed = rms_norm(x, weights["norm"][layer], kind.eps)
    gate = ops.matmul(normed, weights["gate"], layer)
    up = ops.matmul(normed, weights["up"], layer)
    return ops.matmul((jax.nn.silu(gate) * up).astype(x.dtype), weights["down"], layer)
