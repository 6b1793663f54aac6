"""Where the arguments of kernels for TPUs lie, and how. Arrays that are no part of a program, as in tests, stay as
they are."""

from collections.abc import Sequence

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu


def in_main_memory(x: jax.Array) -> jax.Array:
    """An argument of a kernel that stays where it is: on some generations XLA would bring the whole stack into fast
    memory, for the sake of one layer."""
    return pltpu.with_memory_space_constraint(x, pltpu.HBM) if isinstance(x, jax.core.Tracer) else x


def in_order(x: jax.Array, axes: Sequence[int]) -> jax.Array:
    """x with its axes in memory in this order, the last along the lanes. What a kernel reads through a transposition
    XLA might else keep in an order of its own, and turn round for every call."""
    return with_layout_constraint(x, Layout(tuple(axes))) if isinstance(x, jax.core.Tracer) else x
