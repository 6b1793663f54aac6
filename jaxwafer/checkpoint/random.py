"""Random weights for the config of any model, made tensor by tensor as they are asked for."""

import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.model.declare import Weight
from jaxwafer.partition.placement import hub_name
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.convert import dense
from jaxwafer.quant.formats import FORMATS, Format


class NumberTokenizer:
    """Token ids written out: "5 17" is the tokens 5 and 17."""

    eos_ids: tuple[int, ...] = ()
    bos_id, add_bos, chat_template = None, False, None

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        try:
            return [int(word) for word in text.split()]
        except ValueError:
            raise UserError(f"a model of random weights takes token ids, such as '5 17', not {text!r:.40}") from None

    def decode(self, ids) -> str:
        return " ".join(map(str, ids))

    def stream(self) -> "NumberTokenizer":
        return self

    def push(self, token: int) -> str:
        return f"{token} "

    def flush(self) -> str:
        return ""


class RandomCheckpoint:
    """A checkpoint of float32 tensors: matrices with variance 1/inputs, vectors about 1. A tensor depends on its name
    and the seed alone."""

    def __init__(self, config: dict, seed: int = 0):
        self.config, self.seed, self.path = config, seed, Path("random")
        spec = spec_from_config(config)
        self._shapes: dict[str, tuple[int, ...]] = {}
        for weight in spec.globals():
            self._declare(weight, None)
        for number, layer in enumerate(spec.layers):
            for part in filter(None, (layer.mixer, layer.mlp, spec.residual)):
                for weight in part.weights():
                    self._declare(weight, number)

    def _declare(self, weight: Weight, layer: int | None) -> None:
        shape = weight.hub_shape
        if weight.transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        name = hub_name(weight, layer)
        for expert in range(weight.shape[0] if weight.per_expert else 1):
            self._shapes[name.replace("{expert}", str(expert))] = shape

    def names(self) -> Iterator[str]:
        yield from self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise UserError(f"the config declares no tensor {name}")
        return self._shapes[name]

    def stored(self, name: str) -> Format:
        return FORMATS["f32"]

    def read(self, name: str) -> QuantizedArray:
        shape = self.shape(name)
        noise = np.random.default_rng((self.seed, zlib.crc32(name.encode()))).standard_normal(shape, np.float32)
        return dense(1 + 0.1 * noise if len(shape) == 1 else noise / np.float32(shape[-1]) ** 0.5)

    def tokenizer(self) -> NumberTokenizer:
        return NumberTokenizer()
