"""Stream a checkpoint onto its devices, tensor by tensor, each shard straight to where it stays."""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding

from jaxwafer.checkpoint.huge_pages import copied, zeros
from jaxwafer.checkpoint.quantization import Quantization
from jaxwafer.checkpoint.source import Checkpoint
from jaxwafer.errors import UserError
from jaxwafer.model.declare import Weight
from jaxwafer.partition import tree
from jaxwafer.partition.placement import Formats, Placement, Stack, hub_name
from jaxwafer.quant.array import QuantizedArray, assemble
from jaxwafer.quant.convert import convert
from jaxwafer.quant.formats import FORMATS, Format, choose
from jaxwafer.quant.storage import Storage, held_as


def formats_for(checkpoint: Checkpoint, policy: str) -> Formats:
    """The format of each tensor under a weight policy (`quant.formats.POLICIES`), from what the file holds.

    A tensor whose shape is not the declared one is refused here, before anything is compiled.
    """

    def formats(name: str, weight: Weight):
        name = name.replace("{expert}", "0")
        _check_shape(checkpoint, weight, name)
        return choose(policy, weight.role, checkpoint.stored(name))

    return formats


def planned_formats(quantization: Quantization | None, native: str, policy: str) -> Formats:
    """The same by the config alone. native: `ModelSpec.native`.

    Projections are linear modules to the config. Embedding and head are none to most who write such files, unless they
    name them, and K3's latent projections are not quantised although its config does not say so.
    """

    def formats(name: str, weight: Weight) -> Format:
        stored = FORMATS[native]
        if quantization is not None and weight.matrix:
            find = quantization.planned if weight.role in ("attention", "mlp") else quantization.named
            scheme = find(name.replace("{expert}", "0").removesuffix(".weight"))
            stored = scheme.format(stored.dtype) if scheme else stored
        return choose(policy, weight.role, stored)

    return formats


def load_weights(checkpoint: Checkpoint, placement: Placement, mesh: Mesh, formats: dict,
                 progress: Callable[[int], None] = lambda done: None) -> dict:  # fmt: skip
    """The weight tree of a placement on `mesh`, in `formats` (layouts and shardings of the tree's arrays).

    At any time the host holds one float tensor and the stored shards of one weight on one wafer. Only layers of wafers
    that have a device in this process are read. `progress` is called with the bytes that each weight adds, over all
    devices of this process.
    """

    # Where layers' weights wait in the host's memory they never pass through the device's.
    memory = {getattr(f, "sharding", f).memory_kind for f in jax.tree.leaves(formats["mixers"])}.pop()

    def load(storage: Storage, stack: Stack | None) -> dict[str, jax.Array]:
        kind = None if stack is None else memory
        pieces = _global_pieces if stack is None else _stack_pieces
        shards: dict[str, list[jax.Array]] = {}
        for name, device, shard in pieces(checkpoint, placement, mesh, storage, stack):
            place = SingleDeviceSharding(device, memory_kind=kind)
            shard = shard.view(held_as(name, shard.dtype, device.platform))
            shards.setdefault(name, []).append(jax.device_put(shard, place))
        progress(sum(shard.nbytes for on in shards.values() for shard in on))
        arrays = {}
        for name, on in shards.items():
            part = getattr(storage, name)
            sharding = NamedSharding(mesh, tree.part_spec(stack, part), memory_kind=kind)
            arrays[name] = jax.make_array_from_single_device_arrays(
                tree.part_shape(placement, stack, part), sharding, on
            )
        return arrays

    loaded: dict[str, jax.Array] = {}

    def leaf(storage: Storage, stack: Stack | None, name: str) -> jax.Array:
        if name == "values":
            loaded.update(load(storage, stack))
        return loaded.pop(name)

    return jax.tree.map(jax.device_put, tree.build(placement, leaf), formats)


def _global_pieces(checkpoint, placement, mesh, storage, stack):
    """(part, device, shard) of a weight outside the layers, made for each device of this process from its own rows."""
    weight, name = storage.weight, hub_name(storage.weight, None)
    tensor = read_matrix(checkpoint, weight, name)
    sharding = NamedSharding(mesh, tree.part_spec(None, storage.values))
    for device, index in sharding.addressable_devices_indices_map(storage.values.shape).items():
        rows = (i[own] for i, own in zip(storage.index[:1], index, strict=False))
        piece = _placed(tensor, storage, (*rows, *storage.index[1:]))
        for part in storage.names:
            yield part, device, copied(getattr(piece, part))


def _stack_pieces(checkpoint, placement, mesh, storage, stack):
    """(part, device, shard) of a layer weight, one wafer of this process at a time; positions that a wafer does not use
    are zero."""
    local = set(mesh.local_devices)
    for wafer, devices in enumerate(mesh.devices):
        own = [device for device in devices if device in local]
        if not own:
            continue
        host = {
            n: zeros((1, stack.depth, *getattr(storage, n).shape), getattr(storage, n).dtype) for n in storage.names
        }
        for position, layer in enumerate(stack.layers[wafer]):
            tensor = stored_tensor(checkpoint, storage, layer)
            for name in storage.names:
                host[name][0, position] = getattr(tensor, name)
        for name in storage.names:
            part = getattr(storage, name)
            shape = tree.part_shape(placement, stack, part)
            indices = NamedSharding(mesh, tree.part_spec(stack, part)).devices_indices_map(shape)
            for device in own:
                shard = host[name][(slice(None), *indices[device][1:])]
                yield name, device, shard if shard.flags.c_contiguous else copied(shard)


def stored_tensor(checkpoint: Checkpoint, storage: Storage, layer: int) -> QuantizedArray:
    """One weight of a layer in its storage format, padded and with heads in their places; NumPy leaves."""
    weight = storage.weight
    name = hub_name(weight, layer)
    if not weight.per_expert:
        return _placed(read_matrix(checkpoint, weight, name), storage, storage.index)
    experts, *index = storage.index
    stored = checkpoint.stored(name.format(expert=0))
    parts: dict[str, np.ndarray] = {}
    for position, expert in enumerate(experts):
        if expert < 0:
            continue
        own = name.format(expert=expert)
        if checkpoint.stored(own) != stored:
            other = f"{checkpoint.stored(own).name}, but that of expert 0 {stored.name}"
            raise UserError(f"{checkpoint.path}: {own} is stored as {other}; experts of a layer must be alike")
        tensor = _placed(read_matrix(checkpoint, weight, own), storage, tuple(index))
        for part in storage.names:
            one = getattr(tensor, part)
            parts.setdefault(part, np.zeros((len(experts), *one.shape), one.dtype))[position] = one
    return assemble(parts, storage.format)


def _shape(checkpoint: Checkpoint, weight: Weight, name: str) -> tuple[int, ...]:
    """The shape of a tensor of the hub with all its declared axes. A file may leave out the axes named `one`: A_log is
    [1, 1, 32, 1] in Kimi Linear and [128] in Kimi K3."""
    shape, wanted = tuple(checkpoint.shape(name)), weight.axes[weight.per_expert :]
    if len(shape) == sum(a.name != "one" for a in wanted):
        sizes = iter(shape)
        return tuple(1 if a.name == "one" else next(sizes) for a in wanted)
    return shape


def _check_shape(checkpoint: Checkpoint, weight: Weight, name: str) -> None:
    shape, wanted = _shape(checkpoint, weight, name), weight.axes[weight.per_expert :]
    if weight.transposed and checkpoint.stored(name).scale is None:
        wanted = (*wanted[:-2], wanted[-1], wanted[-2])
    if len(shape) != len(wanted) or not all(
        n == a.hub_size or (a.padded and n > a.hub_size) for n, a in zip(shape, wanted, strict=True)
    ):
        axes = " x ".join(f"{a.hub_size} ({a.name})" for a in wanted)
        raise UserError(f"{checkpoint.path}: {name} has shape {list(shape)}, but its config makes it {axes}")


def read_matrix(checkpoint: Checkpoint, weight: Weight, name: str) -> QuantizedArray:
    """A tensor of the hub with all its declared axes; the shape of an expert's is checked only here."""
    _check_shape(checkpoint, weight, name)
    tensor = checkpoint.read(name)
    if weight.transposed and tensor.format.scale is None:
        return tensor.replace(values=np.swapaxes(tensor.values, -1, -2))
    shape = _shape(checkpoint, weight, name)
    return tensor if len(tensor.values.shape) == len(shape) else tensor.replace(values=tensor.values.reshape(shape))


def _placed(tensor: QuantizedArray, storage: Storage, index: tuple[np.ndarray, ...]) -> QuantizedArray:
    """A tensor of the hub with `index` taken along its axes (−1: zero), in the storage format."""
    weight, form = storage.weight, storage.format
    axes = weight.axes[weight.per_expert :]
    index = tuple(np.where(i < 0, -1, a.hub_index()[np.maximum(i, 0)]) for a, i in zip(axes, index, strict=True))
    inputs = weight.hub_shape[-1]
    if not weight.matrix:
        vector = np.asarray(convert(tensor, form, inputs).values) + form.numpy.type(weight.shift)
        for axis, i in enumerate(index):
            vector = _gather(vector, i, axis)
        return QuantizedArray(vector, None, None, format=form)
    *outputs, along = index
    parts = {n: np.asarray(p) for n, p in tensor.parts.items()}
    # Outputs first: a fused tensor holds rows that are not converted in vain.
    for axis, i in enumerate(outputs):
        parts = {n: _gather(a, i, axis) for n, a in parts.items()}
    taken = convert(tensor.replace(**parts), form, inputs)
    parts = {n: np.asarray(getattr(taken, n)) for n in storage.names}
    # Rows of padding are zero bytes, whether they were converted or come so from `_gather`.
    parts = {n: _blank(a, outputs) for n, a in parts.items()} if taken.format != tensor.format else parts
    if form.group is None:
        parts["values"] = _gather(parts["values"], along, -1)
    else:
        # `store` has made sure that every group is a whole one of the file, or padding.
        starts = np.pad(along, (0, -len(along) % form.group), constant_values=-1)[:: form.group]
        groups = np.where(starts < 0, -1, starts // form.group)
        parts = {n: _gather_groups(a, groups, form.groups(inputs)) for n, a in parts.items()}
    return taken.replace(**parts)


def _gather(array: np.ndarray, index: np.ndarray, axis: int) -> np.ndarray:
    """Elements along an axis by index; −1 gives zero."""
    if np.array_equal(index, np.arange(array.shape[axis])):
        return array
    taken = np.take(array, np.maximum(index, 0), axis=axis)
    # A zero of the dtype: e8m0 has none, and makes NaN of 0 but 2⁻¹²⁷ of a byte of zeros.
    taken[(slice(None),) * (axis % array.ndim) + (index < 0,)] = np.zeros((), array.dtype)
    return taken


def _blank(array: np.ndarray, index: Sequence[np.ndarray]) -> np.ndarray:
    """The array with zeros where the index of one of its first axes is −1."""
    for axis, i in enumerate(index):
        if np.any(i < 0):
            array[(slice(None),) * axis + (i < 0,)] = np.zeros((), array.dtype)
    return array


def _gather_groups(array: np.ndarray, groups: np.ndarray, count: int) -> np.ndarray:
    """As `_gather`, on `count` equal runs of the last axis."""
    runs = array.reshape(*array.shape[:-1], count, -1)
    return _gather(runs, groups, -2).reshape(*array.shape[:-1], -1)
