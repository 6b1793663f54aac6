"""The function of each MLP kind: f(kind, weights, layer, x, step, ops) → (partial, touched).

partial: this core's partial sum, float32 [B, T, hidden]. touched: float32 scalar, experts whose weights this core read.
"""

from collections.abc import Callable

from jaxwafer.layers.mlp import dense_mlp
from jaxwafer.model.kinds import MLP, DenseMLP

FUNCTIONS: dict[type, Callable] = {DenseMLP: dense_mlp}


def function(kind: MLP) -> Callable:
    return FUNCTIONS[type(kind)]
