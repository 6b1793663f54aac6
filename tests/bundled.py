"""The bundled checkpoint as plain arrays."""

import numpy as np

from jaxwafer.checkpoint.open import open_checkpoint
from jaxwafer.model.spec import ModelSpec
from jaxwafer.quant.convert import dequantize

NAME = "tiny-kimi-linear"


def tensors() -> dict[str, np.ndarray]:
    """{hub name: float32 array}, dequantised."""
    checkpoint = open_checkpoint(NAME)
    return {name: dequantize(checkpoint.read(name)).reshape(checkpoint.shape(name)) for name in checkpoint.names()}


def parameters(spec: ModelSpec) -> dict:
    """The same as the trainer has them: {module: {hub name: array}}, experts stacked."""
    found, params = tensors(), {}
    for number, layer in enumerate(spec.layers):
        place = f"model.layers.{number}"
        params[place] = {}
        for weight in (w for part in (layer.mixer, layer.mlp) for w in part.weights()):
            name = f"{place}.{weight.hub}"
            experts = range(weight.shape[0]) if weight.per_expert else ()
            each = [found[name.format(expert=n)] for n in experts]
            params[place][weight.hub] = np.stack(each) if each else found[name]
    return params | {weight.hub: found[weight.hub] for weight in spec.globals()}
