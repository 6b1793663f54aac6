"""Rows of a quantised table by their numbers: the signature, and the choice of a backend."""

import jax

from jaxwafer.ops import choice
from jaxwafer.ops.lookup import reference, tpu
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

# Tried in order. Each module has `objection(dtype, form, platform) -> str | None`, `description(form, quantise) -> str`
# and `lookup`, for which dtype is nothing. The reference objects to nothing.
BACKENDS = {"tpu": tpu, "reference": reference}


def lookup(table: QuantizedArray, index: jax.Array, *, backend: str) -> QuantizedArray:
    """table[index]: table [V, K], index int32 [...] within it → [..., K]."""
    return BACKENDS[backend].lookup(table, index)


def choose(form: Format, platform: str) -> str:
    """The backend for a table in this format: the first that does not object."""
    return next(name for name, backend in BACKENDS.items() if not backend.objection(None, form, platform))


def implementation(platform: str) -> dict[str, str]:
    """{"backend", "reason"} on a platform; with every format named where they differ."""
    return choice.implementation(BACKENDS, platform)
