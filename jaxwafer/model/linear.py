"""Linear-attention mixers: fixed state instead of a growing cache. The maths is in `layers/kda.py`, `layers/gdn.py`."""

from dataclasses import dataclass

from jaxwafer.model.attention import matrix, vector
from jaxwafer.model.declare import Axis, HeadAxis, StateField, Weight, Within


@dataclass(frozen=True, kw_only=True)
class KDA:
    """Kimi Delta Attention: a delta rule with a decay for every key channel.

    taps: width of the causal depthwise convolutions of q, k and v. lower_bound: decay g = lower_bound·σ(exp(A)·z) where
    it is given, otherwise −exp(A)·softplus(z). gate_rank: rank of the output gate, None for a full matrix. decay_rank:
    rank of the decay's projection.
    """

    hidden: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    decay_rank: int
    gate_rank: int | None
    lower_bound: float | None = None

    def weights(self) -> tuple[Weight, ...]:
        hidden, one = Axis(name="hidden", size=self.hidden), Axis(name="one", size=1)
        keys, values, each = (self._heads(n) for n in (self.key_dim, self.value_dim, 1))
        taps, low = Axis(name="taps", size=self.taps), Axis(name="rank", size=self.decay_rank)
        found = [
            vector("norm", "input_layernorm.weight", hidden),
            matrix("q", "self_attn.q_proj.weight", keys, hidden),
            matrix("k", "self_attn.k_proj.weight", keys, hidden),
            matrix("v", "self_attn.v_proj.weight", values, hidden),
            vector("q_conv", "self_attn.q_conv1d.weight", keys, one, taps),
            vector("k_conv", "self_attn.k_conv1d.weight", keys, one, taps),
            vector("v_conv", "self_attn.v_conv1d.weight", values, one, taps),
            vector("a_log", "self_attn.A_log", one, one, Axis(name="heads", size=self.heads, padded=True), one),
            vector("dt_bias", "self_attn.dt_bias", keys),
            matrix("f_a", "self_attn.f_a_proj.weight", low, hidden),
            matrix("f_b", "self_attn.f_b_proj.weight", keys, low),
            matrix("b", "self_attn.b_proj.weight", each, hidden),
            vector("o_norm", "self_attn.o_norm.weight", Axis(name="head_dim", size=self.value_dim)),
            matrix("o", "self_attn.o_proj.weight", hidden, values),
        ]
        if self.gate_rank is None:
            found.append(matrix("g", "self_attn.g_proj.weight", values, hidden))
        else:
            rank = Axis(name="rank", size=self.gate_rank)
            found.append(matrix("g_a", "self_attn.g_a_proj.weight", rank, hidden))
            found.append(matrix("g", "self_attn.g_b_proj.weight", values, rank))
        return tuple(found)

    def _heads(self, unit: int) -> Axis:
        return Axis(name="heads", size=self.heads * unit, unit=unit)

    def cache(self) -> tuple[StateField, ...]:
        key, value = Axis(name="key", size=self.key_dim), Axis(name="value", size=self.value_dim)
        past = Axis(name="past", size=self.taps - 1)
        keys, values = self._heads(self.key_dim), self._heads(self.value_dim)
        return (
            StateField(name="state", axes=(self._heads(1), key, value)),
            StateField(name="q_past", axes=(past, keys), inputs=True),
            StateField(name="k_past", axes=(past, keys), inputs=True),
            StateField(name="v_past", axes=(past, values), inputs=True),
        )

    def flops(self, context: float) -> float:
        """FLOPs beside the matrices of one token, ≈ 8·H·K·V, whatever the context."""
        return 8.0 * self.heads * self.key_dim * self.value_dim


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNet:
    """Gated DeltaNet: a delta rule with one decay a head; groups of `value_heads` share `key_heads` keys and queries.

    fused: q, k, v and the gate z lie together by key head in `in_proj_qkvz` (and b, a in `in_proj_ba`), as in
    Qwen3-Next; otherwise in `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`, as in Qwen3.5.
    """

    hidden: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    fused: bool
    norm_shift: float = 0.0

    def weights(self) -> tuple[Weight, ...]:
        hidden, one = Axis(name="hidden", size=self.hidden), Axis(name="one", size=1)
        group = self.value_heads // self.key_heads
        k, v = self.key_dim, group * self.value_dim
        keys, values = self.key_heads * k, self.value_heads * self.value_dim
        hub = "linear_attn."
        if self.fused:
            width = 2 * k + 2 * v
            qkvz = hub + "in_proj_qkvz.weight"
            source = {"q": (qkvz, 0, k, width), "k": (qkvz, k, k, width), "v": (qkvz, 2 * k, v, width),
                      "z": (qkvz, 2 * k + v, v, width)}  # fmt: skip
            ba = hub + "in_proj_ba.weight"
            source |= {"b": (ba, 0, group, 2 * group), "a": (ba, group, group, 2 * group)}
        else:
            qkv, width = hub + "in_proj_qkv.weight", 2 * keys + values
            source = {"q": (qkv, 0, keys, width), "k": (qkv, keys, keys, width), "v": (qkv, 2 * keys, values, width)}
            source |= {
                n: (f"{hub}in_proj_{n}.weight", 0, values if n == "z" else self.value_heads, None) for n in "zba"
            }
        found = [vector("norm", "input_layernorm.weight", hidden, shift=self.norm_shift)]
        for name, (tensor, start, run, width) in source.items():
            within = Within(start=start, run=run, width=width) if width else None
            found.append(matrix(name, tensor, self._axis(name, within), hidden))
        channels, taps = 2 * keys + values, Axis(name="taps", size=self.taps)
        for name, start, run in (("q", 0, keys), ("k", keys, keys), ("v", 2 * keys, values)):
            within = Within(start=start, run=run, width=channels)
            found.append(vector(f"{name}_conv", hub + "conv1d.weight", self._axis(name, within), one, taps))
        return (
            *found,
            vector("a_log", hub + "A_log", self._axis("a")),
            vector("dt_bias", hub + "dt_bias", self._axis("a")),
            vector("o_norm", hub + "norm.weight", Axis(name="head_dim", size=self.value_dim)),
            matrix("o", hub + "out_proj.weight", hidden, self._axis("v")),
        )

    def _axis(self, name: str, within: Within | None = None) -> HeadAxis:
        """The head axis of q and k (key heads), v and z (value heads), a and b (one a value head)."""
        shared = {"kv_heads": self.key_heads, "group": self.value_heads // self.key_heads, "within": within}
        if name in "qk":
            return HeadAxis(name="kv_heads", size=self.key_heads * self.key_dim, unit=self.key_dim, **shared)
        unit = self.value_dim if name in "vz" else 1
        return HeadAxis(name="heads", size=self.value_heads * unit, unit=unit, **shared)

    def cache(self) -> tuple[StateField, ...]:
        key, value = Axis(name="key", size=self.key_dim), Axis(name="value", size=self.value_dim)
        past = Axis(name="past", size=self.taps - 1)
        return (
            StateField(name="state", axes=(self._axis("a"), key, value)),
            *(StateField(name=f"{n}_past", axes=(past, self._axis(n)), inputs=True) for n in "qkv"),
        )

    def flops(self, context: float) -> float:
        """FLOPs beside the matrices of one token, ≈ 8·H·K·V, whatever the context."""
        return 8.0 * self.value_heads * self.key_dim * self.value_dim
