"""Plain JAX: a gather."""

import jax

from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format


def objection(dtype, form: Format, platform: str) -> str | None:
    """Why this backend cannot run these inputs: never."""
    return None


def description(form: Format, quantise: bool) -> str:
    return "plain JAX"


def lookup(table: QuantizedArray, index: jax.Array) -> QuantizedArray:
    return table[index]
