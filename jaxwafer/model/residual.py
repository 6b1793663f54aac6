"""Block attention residuals (Kimi K3): layers read a learned mixture of earlier blocks instead of the plain sum."""

from dataclasses import dataclass

from jaxwafer.model.attention import vector
from jaxwafer.model.declare import Axis, Weight


@dataclass(frozen=True, kw_only=True)
class BlockResidual:
    """Every `every` layers the sum so far becomes a finished block and a new sum begins.

    Before a mixer, an MLP and the final norm the hidden vector is a mixture of the finished blocks and the running sum.
    layers: of the model, which say how many blocks there can be.
    """

    hidden: int
    every: int
    layers: int
    eps: float

    @property
    def blocks(self) -> int:
        return -(-self.layers // self.every)

    def weights(self) -> tuple[Weight, ...]:
        """Of each layer."""
        return tuple(w for place in ("self_attention", "mlp") for w in self._mixture(place, f"{place}_res"))

    def globals(self) -> tuple[Weight, ...]:
        """For the mixture before the final norm."""
        return self._mixture("output", "model.output_attn_res")

    def _mixture(self, name: str, hub: str) -> tuple[Weight, ...]:
        hidden, one = Axis(name="hidden", size=self.hidden), Axis(name="one", size=1)
        return (
            vector(f"{name}_norm", f"{hub}_norm.weight", hidden),
            vector(f"{name}_proj", f"{hub}_proj.weight", one, hidden),
        )
