"""The kinds of layer: frozen dataclasses with `weights()` and, for mixers, `cache()` and `flops(context)`.

Layers with equal kinds share one stack of weights.
"""

from jaxwafer.model.attention import GQA, MLA
from jaxwafer.model.linear import KDA, GatedDeltaNet
from jaxwafer.model.mlp import DenseMLP, MoE

Mixer = GQA | MLA | KDA | GatedDeltaNet
MLP = DenseMLP | MoE
