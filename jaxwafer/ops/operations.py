"""The operations as one program uses them: a backend chosen for each, once, when the engine is made."""

from dataclasses import dataclass

import jax

from jaxwafer.ops.attention import api as attention
from jaxwafer.ops.matmul import api as matmul
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step
from jaxwafer.quant.array import QuantizedArray


@dataclass(frozen=True)
class Operations:
    """platform: of the mesh's devices ("cpu", "gpu", "tpu"). The choice of a backend is `choose` of each operation."""

    platform: str

    def matmul(self, x: jax.Array, weight: QuantizedArray, layer: jax.Array | int) -> jax.Array:
        """x [..., K] @ weight[layer] [N, K]ᵀ → float32 [..., N]."""
        return matmul.matmul(x, weight, layer, backend="reference")

    def paged_attention(self, q: jax.Array, k: Pages, v: Pages, layer: jax.Array, step: Step, *,
                        scale: float) -> jax.Array:  # fmt: skip
        return attention.paged_attention(q, k, v, layer, step, scale=scale, backend="reference")
