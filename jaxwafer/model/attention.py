"""Attention mixers: grouped-query and multi-head latent. The maths is in `layers/gqa.py` and `layers/mla.py`."""

from dataclasses import dataclass

from jaxwafer.model.declare import Axis, HeadAxis, TokenField, Weight, Within
from jaxwafer.model.rope import Rope


@dataclass(frozen=True, kw_only=True)
class GQA:
    """Grouped-query attention: `heads` query heads in groups that share `kv_heads` key/value heads.

    rope: None for no position embedding. qk_norm: RMSNorm over each head of q and k before RoPE. bias, output_bias: of
    the projections. window: keys a query sees, itself included; None for all. sinks: a learned logit a head that takes
    part in the softmax and adds nothing. gate: the output is multiplied by σ(gate x), whose rows lie beside q's in
    `q_proj`. norm_shift: 1 where norm weights are stored around zero.
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    rope: Rope | None
    eps: float
    qk_norm: bool = False
    bias: bool = False
    output_bias: bool = False
    window: int | None = None
    sinks: bool = False
    gate: bool = False
    norm_shift: float = 0.0

    def weights(self) -> tuple[Weight, ...]:
        dim = self.head_dim
        group = {"kv_heads": self.kv_heads, "group": self.heads // self.kv_heads}
        hidden = Axis(name="hidden", size=self.hidden)
        heads = HeadAxis(name="heads", size=self.heads * dim, unit=dim, **group)
        kv_heads = HeadAxis(name="kv_heads", size=self.kv_heads * dim, unit=dim, **group)
        each_head = HeadAxis(name="heads", size=self.heads, unit=1, **group)
        first, second = Within(start=0, run=dim, width=2 * dim), Within(start=dim, run=dim, width=2 * dim)
        q = HeadAxis(name="heads", size=self.heads * dim, unit=dim, within=first if self.gate else None, **group)
        gate = HeadAxis(name="heads", size=self.heads * dim, unit=dim, within=second, **group)
        found = [
            vector("norm", "input_layernorm.weight", hidden, shift=self.norm_shift),
            matrix("q", "self_attn.q_proj.weight", q, hidden),
            matrix("k", "self_attn.k_proj.weight", kv_heads, hidden),
            matrix("v", "self_attn.v_proj.weight", kv_heads, hidden),
            matrix("o", "self_attn.o_proj.weight", hidden, heads),
        ]
        if self.gate:
            found.append(matrix("gate", "self_attn.q_proj.weight", gate, hidden))
        if self.qk_norm:
            found += [
                vector(
                    f"{n}_norm", f"self_attn.{n}_norm.weight", Axis(name="head_dim", size=dim), shift=self.norm_shift
                )
                for n in "qk"
            ]
        if self.bias:
            found += [
                vector(f"{n}_bias", f"self_attn.{n}_proj.bias", a)
                for n, a in zip("qkv", (q, kv_heads, kv_heads), strict=True)
            ]
        if self.output_bias:
            found.append(vector("o_bias", "self_attn.o_proj.bias", hidden))
        if self.sinks:
            found.append(vector("sinks", "self_attn.sinks", each_head))
        return tuple(found)

    def cache(self) -> tuple[TokenField, ...]:
        axis = next(w for w in self.weights() if w.name == "k").axes[0]
        return TokenField(name="k", axis=axis), TokenField(name="v", axis=axis)

    def flops(self, context: float) -> float:
        """FLOPs beside the matrices for one token that sees `context` tokens: 4·H·D·s."""
        return 4.0 * self.heads * self.head_dim * min(context, self.window or context)


@dataclass(frozen=True, kw_only=True)
class MLA:
    """Multi-head latent attention: one latent of `rank` and one shared key of `rope_dims` a token, whatever the heads.

    nope, rope_dims: of each head's key, without and with position; value_dim: of its value. q_rank: the query's own
    low rank, or None. rope: None rotates nothing. scale: of the scores. gate: the output is multiplied by σ(gate x).
    """

    hidden: int
    heads: int
    nope: int
    rope_dims: int
    value_dim: int
    rank: int
    rope: Rope | None
    scale: float
    eps: float
    q_rank: int | None = None
    gate: bool = False

    def weights(self) -> tuple[Weight, ...]:
        hidden, rank = Axis(name="hidden", size=self.hidden), Axis(name="rank", size=self.rank)
        key = self.nope + self.rope_dims
        queries, values = self._heads(key), self._heads(self.value_dim)
        both = self.nope + self.value_dim
        keys_up = self._heads(self.nope, Within(start=0, run=self.nope, width=both))
        values_up = self._heads(self.value_dim, Within(start=self.nope, run=self.value_dim, width=both))
        found = [vector("norm", "input_layernorm.weight", hidden)]
        if self.q_rank is None:
            found.append(matrix("q", "self_attn.q_proj.weight", queries, hidden))
        else:
            low = Axis(name="q_rank", size=self.q_rank)
            found += [
                matrix("q_a", "self_attn.q_a_proj.weight", low, hidden),
                vector("q_a_norm", "self_attn.q_a_layernorm.weight", low),
                matrix("q", "self_attn.q_b_proj.weight", queries, low),
            ]
        latent = Axis(name="latent", size=self.rank + self.rope_dims)
        found += [
            matrix("kv_a", "self_attn.kv_a_proj_with_mqa.weight", latent, hidden),
            vector("kv_a_norm", "self_attn.kv_a_layernorm.weight", rank),
            matrix("k_b", "self_attn.kv_b_proj.weight", keys_up, rank),
            matrix("v_b", "self_attn.kv_b_proj.weight", values_up, rank),
            matrix("o", "self_attn.o_proj.weight", hidden, values),
        ]
        if self.gate:
            found.append(matrix("gate", "self_attn.g_proj.weight", values, hidden))
        return tuple(found)

    def _heads(self, unit: int, within: Within | None = None) -> Axis:
        return Axis(name="heads", size=self.heads * unit, unit=unit, within=within)

    def cache(self) -> tuple[TokenField, ...]:
        width = self.rank + self.rope_dims
        return (TokenField(name="latent", axis=Axis(name="latent", size=width, unit=width), spread=True),)

    def flops(self, context: float) -> float:
        """FLOPs beside the matrices of one token, absorbed: 2·H·s·(2·rank + rope)."""
        return 2.0 * self.heads * context * (2 * self.rank + self.rope_dims)


def matrix(name: str, hub: str, outputs: Axis, inputs: Axis, role: str = "attention") -> Weight:
    return Weight(name=name, hub=hub, axes=(outputs, inputs), role=role)


def vector(name: str, hub: str, *axes: Axis, shift: float = 0.0) -> Weight:
    return Weight(name=name, hub=hub, axes=axes, role="vector", shift=shift)
