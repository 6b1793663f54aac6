"""MLPs: dense, and mixtures of experts. The maths is in `layers/mlp.py` and `layers/moe.py`."""

from dataclasses import dataclass

from jaxwafer.model.attention import matrix, vector
from jaxwafer.model.declare import Axis, Weight, Within

# Columns of an MLP that stay together on a core: the largest group of the group-wise formats, so that a row-parallel
# matrix is never cut through a group.
UNIT = 32


@dataclass(frozen=True, kw_only=True)
class Activation:
    """How gate g and up u are joined.

    name: "silu": silu(g)·u. "situ": a·tanh(g/a)·σ(g)·b·tanh(u/b) with a, b = limits. "swiglu-oai": g clipped above and
    u on both sides at limits[0], then g·σ(1.702·g)·(u + 1).
    """

    name: str = "silu"
    limits: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DenseMLP:
    """Gated MLP: down(activation(gate x, up x)). names: hub names of gate, up and down, under `prefix`."""

    hidden: int
    intermediate: int
    eps: float
    activation: Activation = Activation()
    norm_shift: float = 0.0
    prefix: str = "mlp."
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    def weights(self) -> tuple[Weight, ...]:
        hidden = Axis(name="hidden", size=self.hidden)
        columns = Axis(name="mlp", size=self.intermediate, unit=UNIT)
        gate, up, down = (f"{self.prefix}{n}.weight" for n in self.names)
        return (
            vector("norm", "post_attention_layernorm.weight", hidden, shift=self.norm_shift),
            matrix("gate", gate, columns, hidden, "mlp"),
            matrix("up", up, columns, hidden, "mlp"),
            matrix("down", down, hidden, columns, "mlp"),
        )


@dataclass(frozen=True, kw_only=True)
class Router:
    """How experts are chosen and weighted, in float32.

    score: "softmax" over all experts, "sigmoid" of each, or "softmax-chosen": softmax over the chosen logits. bias: a
    correction added to the scores for the choice alone. logit_bias: added to the logits (gpt-oss).
    groups, kept_groups: experts are chosen within the best groups (by the sum of their two best scores). renormalize:
    weights of the chosen sum to 1. scale: of the weights, last.
    """

    score: str
    chosen: int
    renormalize: bool = True
    scale: float = 1.0
    bias: bool = False
    logit_bias: bool = False
    groups: int = 1
    kept_groups: int = 1


@dataclass(frozen=True, kw_only=True)
class MoE:
    """A mixture of `experts` gated MLPs of which `router.chosen` run for a token, and shared ones that always do.

    shared: columns of the shared experts taken together, 0 for none; shared_gate: their output is multiplied by
    σ(shared_gate x). latent: experts work on a projection of this size (K3's latent MoE), otherwise None. expert_bias:
    biases of the experts' matrices. prefix, names: on the hub. fused: gate and up of all experts in one tensor, with
    interleaved rows (gpt-oss, whose float tensors are transposed) or as two halves where `halves` is set (Qwen3.5).
    """

    hidden: int
    experts: int
    intermediate: int
    router: Router
    eps: float
    shared: int = 0
    shared_gate: bool = False
    latent: int | None = None
    expert_bias: bool = False
    fused: bool = False
    halves: bool = False
    activation: Activation = Activation()
    norm_shift: float = 0.0
    prefix: str = "mlp."
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    router_name: str = "gate"
    shared_names: tuple[str, str, str, str] = ("shared_experts", "gate_proj", "up_proj", "down_proj")

    def weights(self) -> tuple[Weight, ...]:
        hidden, all_experts = Axis(name="hidden", size=self.hidden), Axis(name="router", size=self.experts)
        found = [
            vector("norm", "post_attention_layernorm.weight", hidden, shift=self.norm_shift),
            vector("router", f"{self.prefix}{self.router_name}.weight", all_experts, hidden),
        ]
        if self.router.bias:
            hub = f"{self.prefix}{self.router_name}.e_score_correction_bias"
            found.append(vector("router_bias", hub, all_experts))
        if self.router.logit_bias:
            found.append(vector("router_bias", f"{self.prefix}{self.router_name}.bias", all_experts))
        found += self._fused_experts() if self.fused else self._experts()
        if self.latent:
            found += self._latent()
        if self.shared:
            found += self._shared()
        return tuple(found)

    @property
    def _width(self) -> Axis:
        """What an expert reads and writes."""
        return Axis(name="latent", size=self.latent) if self.latent else Axis(name="hidden", size=self.hidden)

    def _experts(self) -> list[Weight]:
        experts, columns = Axis(name="experts", size=self.experts), Axis(name="columns", size=self.intermediate)
        gate, up, down = (f"{self.prefix}experts.{{expert}}.{n}.weight" for n in self.names)
        return [
            Weight(name="gate", hub=gate, axes=(experts, columns, self._width), role="mlp"),
            Weight(name="up", hub=up, axes=(experts, columns, self._width), role="mlp"),
            Weight(name="down", hub=down, axes=(experts, self._width, columns), role="mlp"),
        ]

    def _fused_experts(self) -> list[Weight]:
        experts, columns = Axis(name="experts", size=self.experts), Axis(name="columns", size=self.intermediate)
        found = []
        run = self.intermediate if self.halves else 1
        for number, name in enumerate(("gate", "up")):
            within = Within(start=number * run, run=run, width=2 * run)
            rows = Axis(name="columns", size=self.intermediate, within=within)
            hub = f"{self.prefix}experts.gate_up_proj"
            found.append(self._fused(name, hub, experts, rows, self._width))
            if self.expert_bias:
                found.append(vector(f"{name}_bias", f"{hub}_bias", experts, rows))
        hub = f"{self.prefix}experts.down_proj"
        found.append(self._fused("down", hub, experts, self._width, columns))
        if self.expert_bias:
            found.append(vector("down_bias", f"{hub}_bias", experts, self._width))
        return found

    def _fused(self, name: str, hub: str, *axes: Axis) -> Weight:
        return Weight(name=name, hub=hub, axes=axes, role="mlp", transposed=not self.halves)

    def _latent(self) -> list[Weight]:
        hidden, slices = Axis(name="hidden", size=self.hidden), Axis(name="mlp", size=self.latent, unit=UNIT)
        return [
            matrix("latent_down", f"{self.prefix}routed_expert_down_proj.weight", slices, hidden, "latent"),
            vector("latent_norm", f"{self.prefix}routed_expert_norm.weight", self._width),
            matrix("latent_up", f"{self.prefix}routed_expert_up_proj.weight", hidden, slices, "latent"),
        ]

    def _shared(self) -> list[Weight]:
        hidden, columns = Axis(name="hidden", size=self.hidden), Axis(name="mlp", size=self.shared, unit=UNIT)
        place, gate, up, down = self.shared_names
        found = [
            matrix("shared_gate_proj", f"{self.prefix}{place}.{gate}.weight", columns, hidden, "mlp"),
            matrix("shared_up_proj", f"{self.prefix}{place}.{up}.weight", columns, hidden, "mlp"),
            matrix("shared_down_proj", f"{self.prefix}{place}.{down}.weight", hidden, columns, "mlp"),
        ]
        if self.shared_gate:
            one = Axis(name="one", size=1)
            found.append(vector("shared_gate", f"{self.prefix}{place}_gate.weight", one, hidden))
        return found
