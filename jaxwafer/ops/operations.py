"""The operations as one program uses them: a backend chosen for each, once, when the engine is made."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import jax

from jaxwafer.model.mlp import Activation
from jaxwafer.ops.append import api as append
from jaxwafer.ops.attention import api as attention
from jaxwafer.ops.backends import implementations
from jaxwafer.ops.delta_rule import api as delta_rule
from jaxwafer.ops.expert_matmul import api as expert_matmul
from jaxwafer.ops.head_matmul import api as head_matmul
from jaxwafer.ops.linear_attention import api as linear_attention
from jaxwafer.ops.linear_attention.form import Form, Projected
from jaxwafer.ops.lookup import api as lookup
from jaxwafer.ops.matmul import api as matmul
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import FORMATS, Format


@dataclass(frozen=True)
class Operations:
    """platform: of the mesh's devices ("cpu", "gpu", "tpu"). int8_activations: rows may be rounded to int8 in blocks of
    32 where they meet integer weights in a kernel that can. The choice of a backend is `choose` of each operation."""

    platform: str
    int8_activations: bool = False

    def matmul(self, x: jax.Array, weight: QuantizedArray | jax.Array, layer: jax.Array | int) -> jax.Array:
        """x [..., K] @ weight[layer] [N, K]ᵀ → float32 [..., N]. weight: stored in a format, or plain float32."""
        if not isinstance(weight, QuantizedArray):
            weight = QuantizedArray(weight, None, None, format=FORMATS["f32"])
        return matmul.matmul(x, weight, layer, **self._matmul(x, weight))

    def project(self, x: jax.Array, norm: jax.Array, weights: Sequence[QuantizedArray], layer: jax.Array | int, *,
                eps: float) -> tuple[jax.Array, ...]:  # fmt: skip
        """RMSNorm(x) [..., K] with norm[layer] @ each weight[layer] [N, K]ᵀ → float32 [..., N] each."""
        return matmul.project(x, norm, weights, layer, eps=eps, **self._matmul(x, *weights))

    def gated(self, x: jax.Array, norm: jax.Array | None, gate: QuantizedArray, up: QuantizedArray,
              layer: jax.Array | int, *, eps: float, activation: Activation) -> jax.Array:  # fmt: skip
        """`activation` of the products of RMSNorm(x), or of x where norm is None, with gate and up → float32."""
        options = self._matmul(x, gate, up)
        return matmul.gated(x, norm, gate, up, layer, eps=eps, activation=activation, **options)

    def _matmul(self, x: jax.Array, *weights: QuantizedArray) -> dict:
        backend = matmul.choose(x.dtype, [w.format for w in weights], self.platform)
        return {"backend": backend, "quantise": self.int8_activations}

    def expert_matmul(self, x: jax.Array, weight: QuantizedArray, layer: jax.Array | int, experts: jax.Array, *,
                      of: int) -> jax.Array:  # fmt: skip
        """x [R, K] @ weight[layer, experts[r]] [N, K]ᵀ → float32 [R, N], zero for experts outside the weight's, which
        are some of `of`."""
        backend = expert_matmul.choose(x.dtype, weight.format, self.platform)
        options = {"backend": backend, "quantise": self.int8_activations}
        return expert_matmul.expert_matmul(x, weight, layer, experts, of=of, **options)

    def expert_gated(self, x: jax.Array, gate: QuantizedArray, up: QuantizedArray, layer: jax.Array | int,
                     experts: jax.Array, *, activation: Activation, of: int) -> jax.Array:  # fmt: skip
        """As `ops.expert_matmul.api.gated`; gate and up are of one format."""
        options = {"backend": expert_matmul.choose(x.dtype, gate.format, self.platform), "of": of}
        options |= {"activation": activation, "quantise": self.int8_activations}
        return expert_matmul.gated(x, gate, up, layer, experts, **options)

    def lookup(self, table: QuantizedArray, index: jax.Array) -> QuantizedArray:
        """table[index] of a table [V, K]."""
        return lookup.lookup(table, index, backend=lookup.choose(table.format, self.platform))

    def absorb(self, x: jax.Array, weight: QuantizedArray, layer: jax.Array | int, inputs: int) -> jax.Array:
        """As `ops.head_matmul.api.absorb`."""
        backend = head_matmul.choose(x.dtype, weight.format, x.shape[3], self.platform)
        return head_matmul.absorb(x, weight, layer, inputs, backend=backend)

    def expand(self, x: jax.Array, weight: QuantizedArray, layer: jax.Array | int) -> jax.Array:
        """As `ops.head_matmul.api.expand`."""
        rows = weight.values.shape[-2] // x.shape[2]
        backend = head_matmul.choose(x.dtype, weight.format, rows, self.platform)
        return head_matmul.expand(x, weight, layer, backend=backend)

    def append(self, pages: Pages, layer: jax.Array, block: jax.Array, offset: jax.Array, rows: jax.Array) -> Pages:
        """As `ops.append.api.append`."""
        return append.append(pages, layer, block, offset, rows, backend=append.choose(self.platform))

    def paged_attention(self, q: jax.Array, k: Pages, v: Pages, layer: jax.Array, step: Step, *, scale: float,
                        window: int | None = None, sinks: jax.Array | None = None) -> jax.Array:  # fmt: skip
        """As `ops.attention.api.paged_attention`."""
        backend = attention.choose(q.dtype, self.platform)
        return attention.paged_attention(q, k, v, layer, step, scale=scale, window=window, sinks=sinks, backend=backend)

    def latent_attention(self, q: jax.Array, latent: Pages, layer: jax.Array, step: Step, *, rank: int, scale: float,
                         first: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
        """As `ops.attention.api.latent_attention`."""
        backend = attention.choose(q.dtype, self.platform)
        return attention.latent_attention(q, latent, layer, step, rank=rank, scale=scale, first=first, backend=backend)

    def linear_attention(self, projected: Projected, weights: dict[str, jax.Array], index: jax.Array,
                         cache: dict[str, State], layer: jax.Array, slot: jax.Array, step: Step,
                         form: Form) -> tuple[jax.Array, dict[str, State]]:  # fmt: skip
        """As `ops.linear_attention.api.linear_attention`."""
        backends = {"backend": linear_attention.choose(self.platform), "recurrence": delta_rule.choose(self.platform)}
        return linear_attention.linear_attention(projected, weights, index, cache, layer, slot, step, form, **backends)

    def report(
        self, dtype, formats: list[Format], expert_formats: list[Format], others: Iterable[str]
    ) -> dict[str, dict]:
        """{operation: {"backend", "reason"}} of a program with activations of `dtype`, weights and experts in `formats`
        and `expert_formats`, and `others` of the operations in `backends.OPERATIONS`."""
        found = {}
        for name, api, each in (("matmul", matmul, formats), ("expert_matmul", expert_matmul, expert_formats)):
            for form in each:
                backend, reason = api.explain(dtype, form, self.platform, quantise=self.int8_activations)
                found[f"{name} {form.name}"] = {"backend": backend, "reason": reason}
        rest = implementations(self.platform)
        return found | {name: rest[name] for name in rest if name in others}
