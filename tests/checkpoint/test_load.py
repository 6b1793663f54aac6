"""From a checkpoint to the devices."""

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from support import MemoryCheckpoint, checkpoint
from tiny_k3 import tiny_k3

from jaxwafer.checkpoint.load import formats_for, load_weights, stored_tensor
from jaxwafer.errors import UserError
from jaxwafer.mesh import MeshShape, make_mesh
from jaxwafer.model import spec_from_config
from jaxwafer.partition import tree
from jaxwafer.partition.placement import Placement, hub_name, place
from jaxwafer.partition.plan import Partition, uniform
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.convert import convert, dequantize
from jaxwafer.quant.formats import POLICIES
from jaxwafer.quant.storage import Storage

# SmolLM2's heads: 9 queries, 3 keys and values.
HEADS = dict(num_attention_heads=9, num_key_value_heads=3, head_dim=32, num_hidden_layers=4)
MESHES = ["1x1", "1x2", "2x2", "3x5"]


def loaded(source: MemoryCheckpoint, policy: str, mesh: str, partition: Partition | None = None, **options):
    wafers, cores = map(int, mesh.split("x"))
    spec = spec_from_config(source.config)
    partition = partition or uniform(len(spec.layers), wafers)
    placement = place(spec, partition, formats_for(source, policy), cores=cores)
    devices = make_mesh(MeshShape(wafers, cores))
    formats = jax.tree.map(lambda spec: NamedSharding(devices, spec), tree.specs(placement))
    return placement, load_weights(source, placement, devices, formats, **options)


def each_weight(placement: Placement, weights: dict):
    """(storage, hub name, the weight's global arrays without stack axes) for every tensor of the model."""
    for name, storage in placement.globals.items():
        yield storage, hub_name(storage.weight, None), weights["globals"][name]
    for stacks, trees in ((placement.mixers, weights["mixers"]), (placement.mlps, weights["mlps"])):
        for stack, on_device in zip(stacks, trees, strict=True):
            for name, storage in stack.weights.items():
                for wafer, layers in enumerate(stack.layers):
                    for position, layer in enumerate(layers):
                        part = jax.tree.map(lambda a: np.asarray(a)[wafer, position], on_device[name])  # noqa: B023
                        yield storage, hub_name(storage.weight, layer), part


def values(weight) -> np.ndarray:
    if isinstance(weight, QuantizedArray):
        return dequantize(jax.tree.map(np.asarray, weight))
    return np.asarray(weight)


def unplaced(storage: Storage, placed: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Placed values back in the checkpoint's order; copies must agree and padding must be zero."""
    placed = placed[..., : len(storage.index[-1])]
    grid = np.ix_(*storage.index)
    real = np.ones(placed.shape, bool)
    for axis, index in enumerate(storage.index):
        real &= np.expand_dims(index >= 0, [n for n in range(len(storage.index)) if n != axis])
    assert not placed[~real].any()
    out = np.full(shape, np.nan, np.float32)
    out[tuple(np.broadcast_to(g, placed.shape)[real] for g in grid)] = placed[real]
    np.testing.assert_array_equal(out[tuple(np.broadcast_to(g, placed.shape)[real] for g in grid)], placed[real])
    return out


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("mesh", MESHES)
def test_the_devices_hold_the_checkpoints_values_for_every_policy_and_mesh(policy, mesh):
    source = checkpoint(form="bf16", **HEADS)
    placement, weights = loaded(source, policy, mesh)
    seen = []
    for storage, name, weight in each_weight(placement, weights):
        stored = convert(source.read(name), storage.format, source.shape(name)[-1])
        expected = dequantize(stored)[..., : source.shape(name)[-1]]
        np.testing.assert_array_equal(unplaced(storage, values(weight), source.shape(name)), expected, err_msg=name)
        seen.append(name)
    assert sorted(seen) == sorted(source.names())


@pytest.mark.parametrize("mesh", MESHES)
def test_every_tensor_is_read_once(mesh):
    source = checkpoint(**HEADS)
    loaded(source, "native", mesh)
    assert sorted(source.reads) == sorted(source.names())


def test_a_tied_embedding_is_read_once():
    source = checkpoint(tie_word_embeddings=True)
    loaded(source, "int8", "2x2")
    assert sorted(source.reads) == sorted(source.names()) and "lm_head.weight" not in source.reads


@pytest.mark.parametrize("form", ["int4-min", "int4", "int8-g32"])
@pytest.mark.parametrize("mesh", MESHES)
def test_blocks_of_a_file_are_placed_to_the_bit(form, mesh):
    """A group's nibbles, scale and minimum stand together wherever its heads and columns went."""
    source = checkpoint(form=form, **HEADS)
    placement, weights = loaded(source, "native", mesh)
    for storage, name, weight in each_weight(placement, weights):
        if not isinstance(weight, QuantizedArray):
            continue
        file = source.read(name)
        starts = np.pad(storage.index[1], (0, -len(storage.index[1]) % 32), constant_values=-1)[::32]
        for n in ("values", "scale", "minimum"):
            whole, placed = getattr(file, n), getattr(weight, n)
            if whole is None:
                assert placed is None
                continue
            rows, placed = whole.shape[0], np.asarray(placed)
            runs = whole.reshape(rows, len(range(0, source.shape(name)[1], 32)), -1)
            got = placed.reshape(placed.shape[0], len(starts), -1)
            for row, origin in enumerate(storage.index[0]):
                for group, start in enumerate(starts):
                    expected = runs[origin, start // 32] if origin >= 0 and start >= 0 else 0
                    assert np.array_equal(got[row, group], np.broadcast_to(expected, got.shape[2:])), (name, n)


def test_a_stack_holds_nothing_where_a_wafer_has_fewer_layers():
    source = checkpoint(**HEADS)
    _, weights = loaded(source, "native", "3x1", Partition(((0, 1, 2), (), (3,))))
    for leaf in jax.tree.leaves((weights["mixers"], weights["mlps"])):
        assert leaf.shape[:2] == (3, 3)
        whole = np.asarray(leaf)
        assert whole[0].any() and not whole[1].any() and whole[2, 0].any() and not whole[2, 1:].any()


def test_every_shard_is_on_the_device_the_mesh_names():
    source = checkpoint(**HEADS)
    placement, weights = loaded(source, "native", "2x2")
    mesh = make_mesh(MeshShape(2, 2))
    up = weights["mlps"][0]["up"].values
    for shard in up.addressable_shards:
        wafer, core = np.argwhere(mesh.devices == shard.device)[0]
        assert shard.index[0] == slice(wafer, wafer + 1)
        half = placement.mlps[0].weights["up"].values.shape[0] // 2
        assert shard.index[2] == slice(core * half, (core + 1) * half)


def test_progress_adds_up_to_all_bytes():
    source, done = checkpoint(**HEADS), []
    placement, weights = loaded(source, "mixed", "2x2", progress=done.append)
    total = sum(s.data.nbytes for leaf in jax.tree.leaves(weights) for s in leaf.addressable_shards)
    assert sum(done) == total == 2 * placement.allocated_bytes
    assert len(done) == len(placement.globals) + sum(len(s.weights) for s in (*placement.mixers, *placement.mlps))


@pytest.mark.parametrize(
    "name, shape, message",
    [
        (
            "model.layers.2.mlp.up_proj.weight",
            (48, 80),
            "has shape [48, 80], but its config makes it 80 (mlp) x 48 (hidden)",
        ),
        (
            "model.layers.0.self_attn.k_proj.weight",
            (96, 48, 1),
            "has shape [96, 48, 1], but its config makes it 96 (kv_heads)",
        ),
        ("model.norm.weight", (47,), "has shape [47], but its config makes it 48 (hidden)"),
        ("lm_head.weight", (100, 48), "has shape [100, 48], but its config makes it 101 (vocab) x 48 (hidden)"),
    ],
)
def test_a_tensor_of_another_shape_is_refused_by_name(name, shape, message):
    source = checkpoint(**HEADS)
    source.tensors[name] = np.zeros(shape, np.float32)
    with pytest.raises(UserError) as error:
        loaded(source, "f32", "2x2")
    assert f"memory: {name} {message}" in str(error.value)


def test_a_tensor_that_is_not_there_is_refused_by_name():
    source = checkpoint(**HEADS)
    del source.tensors["model.layers.1.self_attn.v_proj.weight"]
    with pytest.raises(UserError, match="no tensor model.layers.1.self_attn.v_proj.weight"):
        loaded(source, "native", "1x1")


def test_zero_heads_are_zero_in_every_part():
    source = checkpoint(form="int4-min", **HEADS)
    placement, _ = loaded(source, "native", "1x2")
    k = placement.mixers[0].weights["k"]
    stored = stored_tensor(source, k, 0)
    assert k.index[0][96:].tolist() == [-1] * 32
    assert not any(getattr(stored, n)[96:].any() for n in k.names)


@pytest.mark.parametrize("shape", [(12,), (1, 1, 12, 1), (3,)])
def test_axes_of_one_element_may_be_missing_from_a_file_and_padded_ones_be_longer(shape):
    source = tiny_k3()
    name = "model.layers.0.self_attn.A_log"
    rates = source.tensors[name][:3]
    source.tensors[name] = np.resize(source.tensors[name], shape)
    placement = place(spec_from_config(source.config), uniform(7, 1), formats_for(source, "native"), cores=2)
    stored = stored_tensor(source, placement.mixers[0].weights["a_log"], 0)
    assert np.asarray(stored.values).reshape(-1).tolist() == [*rates, 0]


@pytest.mark.parametrize("shape", [(2,), (1, 12), (1, 1, 12, 2)])
def test_other_shapes_are_refused(shape):
    source = tiny_k3()
    source.tensors["model.layers.0.self_attn.A_log"] = np.zeros(shape, np.float32)
    with pytest.raises(UserError, match=r"A_log has shape .*, but its config makes it 1 \(one\) x 1 \(one\) x 3 "):
        formats_for(source, "native")(
            "model.layers.0.self_attn.A_log",
            next(w for w in spec_from_config(source.config).layers[0].mixer.weights() if w.name == "a_log"),
        )
