"""What every checkpoint reader offers, whatever the file format."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from jaxwafer.checkpoint.tokenizer import Tokenizer
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format


class Checkpoint(Protocol):
    """Weights on disk under hub names (`model.layers.0.self_attn.q_proj.weight`, …), read one tensor at a time.

    path: the file or folder. config: fields of a Hugging Face config.json (translated, for other file formats).
    """

    path: Path
    config: dict

    def names(self) -> Iterator[str]:
        """Hub names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Elements along each axis, outermost first; a missing tensor is a UserError that names it."""
        ...

    def stored(self, name: str) -> Format:
        """The format that the file holds a tensor in."""
        ...

    def read(self, name: str) -> QuantizedArray:
        """One tensor, with NumPy leaves, repacked (never requantised) into the layout of `quant.formats`."""
        ...

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that comes with the weights; where it is missing, a UserError names the missing file."""
        ...
