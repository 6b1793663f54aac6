"""The operations as one program uses them: a backend chosen for each, once, when the engine is made."""

from collections.abc import Iterable
from dataclasses import dataclass

import jax

from jaxwafer.ops.attention import api as attention
from jaxwafer.ops.backends import implementations
from jaxwafer.ops.causal_conv import api as causal_conv
from jaxwafer.ops.delta_rule import api as delta_rule
from jaxwafer.ops.expert_matmul import api as expert_matmul
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
        backend = matmul.choose(x.dtype, weight.format.name, self.platform)
        return matmul.matmul(x, weight, layer, backend=backend)

    def expert_matmul(self, x: jax.Array, weight: QuantizedArray, layer: jax.Array | int,
                      experts: jax.Array) -> jax.Array:  # fmt: skip
        """x [R, K] @ weight[layer, experts[r]] [N, K]ᵀ → float32 [R, N], zero for experts outside the weight's."""
        backend = expert_matmul.choose(x.dtype, weight.format.name, self.platform)
        return expert_matmul.expert_matmul(x, weight, layer, experts, backend=backend)

    def paged_attention(self, q: jax.Array, k: Pages, v: Pages, layer: jax.Array, step: Step, *, scale: float,
                        window: int | None = None, sinks: jax.Array | None = None) -> jax.Array:  # fmt: skip
        """As `ops.attention.api.paged_attention`."""
        return attention.paged_attention(
            q, k, v, layer, step, scale=scale, window=window, sinks=sinks, backend="reference"
        )

    def latent_attention(self, q: jax.Array, latent: Pages, layer: jax.Array, step: Step, *, rank: int, scale: float,
                         first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """As `ops.attention.api.latent_attention`."""
        return attention.latent_attention(
            q, latent, layer, step, rank=rank, scale=scale, first=first, backend="reference"
        )

    def delta_rule(self, q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array,
                   state: jax.Array) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """As `ops.delta_rule.api.delta_rule`."""
        return delta_rule.delta_rule(q, k, v, g, beta, state, backend="reference")

    def causal_conv(self, x: jax.Array, past: jax.Array, weight: jax.Array, count: jax.Array):
        """As `ops.causal_conv.api.causal_conv`."""
        return causal_conv.causal_conv(x, past, weight, count, backend="reference")

    def report(self, dtype, formats: list[str], expert_formats: list[str], others: Iterable[str]) -> dict[str, dict]:
        """{operation: {"backend", "reason"}} of a program with activations of `dtype`, weights and experts in `formats`
        and `expert_formats`, and `others` of the operations in `backends.OPERATIONS`."""
        found = {}
        for name, api, each in (("matmul", matmul, formats), ("expert_matmul", expert_matmul, expert_formats)):
            for form in each:
                backend, reason = api.explain(dtype, form, self.platform)
                found[f"{name} {form}"] = {"backend": backend, "reason": reason}
        rest = implementations(self.platform)
        return found | {name: rest[name] for name in rest if name in others}
