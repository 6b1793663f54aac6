"""What a declared weight occupies: the arrays of its format, their shapes, sharding and bytes on a given mesh.

The loader allocates from this, the planner and the counters add it up, so their bytes are the same by construction.
"""

import math
from dataclasses import dataclass, replace

import numpy as np

from jaxwafer.errors import UserError
from jaxwafer.model.declare import Weight
from jaxwafer.quant.formats import Format


@dataclass(frozen=True, kw_only=True)
class Part:
    """One array of a stored weight. shape: global, without stack axes. axes: mesh axes of each dimension."""

    shape: tuple[int, ...]
    dtype: np.dtype
    axes: tuple[tuple[str, ...], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array, over all its shards."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def device_bytes(self, wafers: int, cores: int) -> int:
        """Bytes of the shard on one device; what is not sharded is on every device."""
        sizes = {"wafer": wafers, "core": cores}
        return self.nbytes // math.prod(sizes[a] for axes in self.axes for a in axes)


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A weight in a format on a mesh of `wafers` × `cores`; vectors have values alone.

    index: for each axis of the weight the checkpoint index of each stored element (-1: padding), before packing.
    """

    weight: Weight
    format: Format
    values: Part
    scale: Part | None
    zero: Part | None
    minimum: Part | None
    index: tuple[np.ndarray, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Which of the parts of a `QuantizedArray` there are."""
        return tuple(n for n in ("values", "scale", "zero", "minimum") if getattr(self, n) is not None)

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(getattr(self, n) for n in self.names)

    @property
    def padding(self) -> float:
        """Share of the stored elements that are padding or copies of others."""
        distinct = math.prod(len(np.unique(i[i >= 0])) for i in self.index)
        return 1.0 - distinct / math.prod(len(i) for i in self.index)

    def wafer_bytes(self, wafers: int, cores: int) -> int:
        """Bytes on one wafer (of one layer, for a layer's weight), padding and copies on each core included."""
        return cores * sum(p.device_bytes(wafers, cores) for p in self.parts)


def held_as(name: str, dtype: np.dtype, platform: str) -> np.dtype:
    """The dtype of a part of a `QuantizedArray` in the memory of a platform's devices.

    A TPU's kernels cannot read every type of scale. It keeps the bits of such as whole numbers from the start: made of
    the numbers later, they would be a copy of every layer's scales in each tick.
    """
    if platform == "tpu" and name in ("scale", "minimum"):
        return {"float16": np.dtype(np.uint16), "float8_e8m0fnu": np.dtype(np.uint8)}.get(dtype.name, dtype)
    return dtype


def store(weight: Weight, form: Format, *, wafers: int, cores: int) -> Storage:
    """Place a weight. Inputs that the mesh cuts through a quantisation group are refused, naming tensor and sizes."""
    shards = [a.shards(wafers, cores) for a in weight.axes]
    index = tuple(a.placed(n) for a, n in zip(weight.axes, shards, strict=True))
    shape = tuple(len(i) for i in index)
    axes = tuple(a.mesh_axes for a in weight.axes)
    if not weight.matrix:
        return Storage(weight=weight, format=form, index=index, scale=None, zero=None, minimum=None,
                       values=Part(shape=shape, dtype=form.numpy, axes=axes))  # fmt: skip
    *outer, inputs = shape
    if form.group and weight.axes[-1].mesh_axes:
        _check_groups(weight, form, index[-1], shards[-1])
    values = Part(shape=(*outer, form.row_bytes(inputs)), dtype=form.numpy, axes=axes)
    scale = None
    if form.scale is not None:
        scale_axes = axes if form.group else (*axes[:-1], ())
        scale = Part(shape=(*outer, form.groups(inputs)), dtype=form.scale_numpy, axes=scale_axes)
    zero = replace(scale, dtype=np.dtype(np.uint8)) if form.zero else None
    return Storage(weight=weight, format=form, index=index, values=values, scale=scale, zero=zero,
                   minimum=scale if form.minimum else None)  # fmt: skip


def _check_groups(weight: Weight, form: Format, index: np.ndarray, shards: int) -> None:
    """Each stored group of inputs must be one whole group of the checkpoint, or all padding."""
    axis, local = weight.axes[-1], len(index) // shards
    groups = np.pad(index, (0, -len(index) % form.group), constant_values=-1).reshape(-1, form.group)
    start = groups[:, :1]
    whole = start + np.arange(form.group)
    kept = (groups == np.where(whole < axis.size, whole, -1)) & (start % form.group == 0)
    if (local % form.group and shards > 1) or not np.all(kept | (groups < 0)):
        raise UserError(
            f"{weight.hub}: axis {axis.name!r} of {axis.size} over {shards} cores gives {local} inputs a core in "
            f"units of {axis.unit}, which cuts the {form.name} groups of {form.group}; use other weights or fewer cores"
        )
