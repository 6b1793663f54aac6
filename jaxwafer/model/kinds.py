"""Layer kinds: the mixers and MLPs a model is made of, with the declaration of every weight and cache field.

A kind is a frozen dataclass, so two layers with equal kinds share one stack of weights. The maths of a kind is in
`jaxwafer/layers`, in the file of the same name.
"""

from dataclasses import dataclass

from jaxwafer.model.declare import Axis, CacheField, HeadAxis, Weight
from jaxwafer.model.rope import Rope

# Columns of an MLP that stay together on a core: the largest group of the group-wise formats, so that a row-parallel
# matrix is never cut through a group.
MLP_UNIT = 32


@dataclass(frozen=True, kw_only=True)
class GQA:
    """Grouped-query attention: `heads` query heads in groups that share `kv_heads` key/value heads."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope
    eps: float

    @property
    def _axes(self) -> tuple[Axis, HeadAxis, HeadAxis]:
        shared = dict(kv_heads=self.kv_heads, group=self.heads // self.kv_heads, unit=self.head_dim)
        return (
            Axis(name="hidden", size=self.hidden),
            HeadAxis(name="heads", size=self.heads * self.head_dim, **shared),
            HeadAxis(name="kv_heads", size=self.kv_heads * self.head_dim, **shared),
        )

    def weights(self) -> tuple[Weight, ...]:
        hidden, heads, kv_heads = self._axes
        return (
            Weight(name="norm", hub="input_layernorm.weight", axes=(hidden,), role="vector"),
            Weight(name="q", hub="self_attn.q_proj.weight", axes=(heads, hidden), role="attention"),
            Weight(name="k", hub="self_attn.k_proj.weight", axes=(kv_heads, hidden), role="attention"),
            Weight(name="v", hub="self_attn.v_proj.weight", axes=(kv_heads, hidden), role="attention"),
            Weight(name="o", hub="self_attn.o_proj.weight", axes=(hidden, heads), role="attention"),
        )

    def cache(self) -> tuple[CacheField, ...]:
        _, _, kv_heads = self._axes
        return CacheField(name="k", axes=(kv_heads,)), CacheField(name="v", axes=(kv_heads,))

    def attention_flops(self, context: float) -> float:
        """FLOPs of scores and weighted values for one token that attends to `context` tokens: 4·H·D·s."""
        return 4.0 * self.heads * self.head_dim * context


@dataclass(frozen=True, kw_only=True)
class DenseMLP:
    """SiLU-gated MLP: down(silu(gate x) ⊙ up x)."""

    hidden: int
    intermediate: int
    eps: float

    def weights(self) -> tuple[Weight, ...]:
        hidden = Axis(name="hidden", size=self.hidden)
        columns = Axis(name="mlp", size=self.intermediate, unit=MLP_UNIT)
        return (
            Weight(name="norm", hub="post_attention_layernorm.weight", axes=(hidden,), role="vector"),
            Weight(name="gate", hub="mlp.gate_proj.weight", axes=(columns, hidden), role="mlp"),
            Weight(name="up", hub="mlp.up_proj.weight", axes=(columns, hidden), role="mlp"),
            Weight(name="down", hub="mlp.down_proj.weight", axes=(hidden, columns), role="mlp"),
        )


Mixer = GQA
MLP = DenseMLP
