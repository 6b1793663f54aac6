"""What a declared cache field occupies: rows of KV a token, state a request.

The cache allocates from this and the planner adds it up, so their bytes are the same by construction.
"""

import math
from collections.abc import Iterable

import ml_dtypes
import numpy as np

from jaxwafer.errors import UserError
from jaxwafer.model.declare import Axis, Field, StateField, TokenField

KV_DTYPES = {"fp8": np.dtype(ml_dtypes.float8_e4m3fn), "bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype("float32")}


def check_kv_format(name: str) -> str:
    if name not in KV_DTYPES:
        raise UserError(f"unknown KV cache format {name!r}; choose one of {', '.join(KV_DTYPES)}")
    return name


def row_bytes(name: str, dim: int) -> int:
    """Bytes of one head of one token in a KV format; FP8 rows have an exponent of one byte."""
    return dim * KV_DTYPES[name].itemsize + (name == "fp8")


def stored_size(axis: Axis, wafers: int, cores: int) -> int:
    """Elements along an axis over all cores of a wafer, padding and copies included."""
    return len(axis.placed(axis.shards(wafers, cores)))


def token_bytes(fields: Iterable[Field], name: str, wafers: int, cores: int) -> int:
    """Bytes a token takes in one layer over all cores."""
    axes = (f.axis for f in fields if isinstance(f, TokenField))
    return sum(stored_size(a, wafers, cores) // a.unit * row_bytes(name, a.unit) for a in axes)


def state_bytes(fields: Iterable[Field], activation: int, wafers: int, cores: int) -> int:
    """Bytes of state a request takes in one layer over all cores; activation: bytes of an element of the past."""
    states = (f for f in fields if isinstance(f, StateField))
    return sum(
        math.prod(stored_size(a, wafers, cores) for a in f.axes) * (activation if f.inputs else 4) for f in states
    )


def needed_token_bytes(fields: Iterable[Field], name: str) -> int:
    """The same for the maths alone: one copy of every head, no exponents."""
    return sum(f.axis.size * KV_DTYPES[name].itemsize for f in fields if isinstance(f, TokenField))


def needed_state_bytes(fields: Iterable[Field], activation: int) -> int:
    """State of one layer for the maths alone: no padded heads."""
    states = (f for f in fields if isinstance(f, StateField))
    return sum(math.prod(a.size for a in f.axes) * (activation if f.inputs else 4) for f in states)
