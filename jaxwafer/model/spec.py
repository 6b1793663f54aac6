"""ModelSpec: everything the engine, the planner and the counters know about a model, and nothing they do not."""

from dataclasses import dataclass

from jaxwafer.model.declare import Axis, Weight
from jaxwafer.model.kinds import MLP, Mixer, MoE
from jaxwafer.model.residual import BlockResidual


@dataclass(frozen=True, kw_only=True)
class Layer:
    mixer: Mixer
    mlp: MLP


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A decoder-only model.

    family: the config's architecture. layers: in order. tied: the head is the embedding. max_context: positions the
    model was made for. native: the format name that a bare checkpoint of this config stores its matrices in.
    norm_shift: 1 where the final norm's weights are stored around zero. residual: None for the plain sum.
    """

    family: str
    hidden: int
    vocab: int
    layers: tuple[Layer, ...]
    eps: float
    tied: bool
    max_context: int
    native: str
    norm_shift: float = 0.0
    residual: BlockResidual | None = None

    def globals(self) -> tuple[Weight, ...]:
        """Weights outside the layers: embedding, final norm and, unless tied, the head."""
        hidden, vocab = Axis(name="hidden", size=self.hidden), Axis(name="vocab", size=self.vocab)
        weights = [
            Weight(name="embedding", hub="model.embed_tokens.weight", axes=(vocab, hidden), role="embedding"),
            Weight(name="final_norm", hub="model.norm.weight", axes=(hidden,), role="vector", shift=self.norm_shift),
        ]
        if not self.tied:
            weights.append(Weight(name="head", hub="lm_head.weight", axes=(vocab, hidden), role="head"))
        return (*weights, *(self.residual.globals() if self.residual else ()))

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        """The distinct mixer kinds, in order of first use."""
        return tuple(dict.fromkeys(layer.mixer for layer in self.layers))

    @property
    def mlps(self) -> tuple[MLP, ...]:
        """The distinct MLP kinds, in order of first use."""
        return tuple(dict.fromkeys(layer.mlp for layer in self.layers))

    @property
    def parameters(self) -> int:
        """Elements of all weights as the checkpoint holds them."""
        layers = sum(w.size for layer in self.layers for part in (layer.mixer, layer.mlp) for w in part.weights())
        return layers + self._residual_parameters + sum(w.size for w in self.globals())

    @property
    def active_parameters(self) -> int:
        """Elements that one token needs: of experts the chosen, of an embedding that is not the head a row."""

        def active(kind: Mixer | MLP) -> int:
            chosen = kind.router.chosen if isinstance(kind, MoE) else 0
            return sum(w.size // w.shape[0] * chosen if w.of_experts else w.size for w in kind.weights())

        layers = sum(active(part) for layer in self.layers for part in (layer.mixer, layer.mlp))
        unread = 0 if self.tied else (self.vocab - 1) * self.hidden
        return layers + self._residual_parameters + sum(w.size for w in self.globals()) - unread

    @property
    def _residual_parameters(self) -> int:
        return len(self.layers) * sum(w.size for w in self.residual.weights()) if self.residual else 0
