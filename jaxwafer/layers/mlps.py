"""The phases of an MLP, for each kind.

`phases(kind)` are functions on one core's shard, run in this order. Every second one, starting with the second, is made
of collectives over cores and is run outside of any branch; most kinds have one phase alone.

    f(kind, weights, layer, x or carry, step, ops) → carry, from the last (partial, touched)
    f(kind, carry) → carry                                                  collectives

`layer` is the position in the stack. partial: this core's partial sum, float32 [B, T, hidden]. touched: float32 scalar,
experts whose weights this core read. What passes between phases is up to the kind.
"""

from collections.abc import Callable

from jaxwafer.layers.mlp import dense_mlp
from jaxwafer.layers.moe import phases as moe_phases
from jaxwafer.model.kinds import MLP, DenseMLP, MoE

PHASES: dict[type, Callable[[MLP], tuple[Callable, ...]]] = {DenseMLP: lambda kind: (dense_mlp,), MoE: moe_phases}


def phases(kind: MLP) -> tuple[Callable, ...]:
    return PHASES[type(kind)](kind)
