"""The pytree of a placed model's weights, built leaf by leaf from its placement.

{"globals": {name: leaf}, "mixers": ({name: leaf}, …), "mlps": (…), "residuals": (…)}: a matrix is a QuantizedArray, a
vector one array. Layer weights carry [wafers, depth] in front. Abstract shapes, shardings and the loaded arrays are all
built here.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec

from jaxwafer.partition.placement import Placement, Stack
from jaxwafer.quant.array import assemble
from jaxwafer.quant.storage import Part, Storage, held_as


def build(placement: Placement, leaf: Callable[[Storage, Stack | None, str], object]) -> dict:
    """leaf(storage, stack, part) for every array; part is one of `storage.names`; stack is None for globals."""

    def weight(storage: Storage, stack: Stack | None) -> object:
        parts = {name: leaf(storage, stack, name) for name in storage.names}
        if not storage.weight.matrix:
            return parts["values"]
        return assemble(parts, storage.format)

    def layer(stacks: tuple[Stack, ...]) -> tuple[dict, ...]:
        return tuple({name: weight(s, stack) for name, s in stack.weights.items()} for stack in stacks)

    return {
        "globals": {name: weight(s, None) for name, s in placement.globals.items()},
        "mixers": layer(placement.mixers),
        "mlps": layer(placement.mlps),
        "residuals": layer(placement.residuals),
    }


def part_shape(placement: Placement, stack: Stack | None, part: Part) -> tuple[int, ...]:
    """Global shape of an array, stack axes included."""
    return part.shape if stack is None else (placement.wafers, stack.depth, *part.shape)


def part_spec(stack: Stack | None, part: Part) -> PartitionSpec:
    axes = tuple(names or None for names in part.axes)
    return PartitionSpec(*axes) if stack is None else PartitionSpec("wafer", None, *axes)


def abstract(placement: Placement, platform: str) -> dict:
    """`jax.ShapeDtypeStruct`s of every array as devices of a platform hold it."""

    def leaf(storage: Storage, stack: Stack | None, name: str):
        part = getattr(storage, name)
        return jax.ShapeDtypeStruct(part_shape(placement, stack, part), held_as(name, part.dtype, platform))

    return build(placement, leaf)


def specs(placement: Placement) -> dict:
    """The PartitionSpec of every array."""
    return build(placement, lambda storage, stack, name: part_spec(stack, getattr(storage, name)))
