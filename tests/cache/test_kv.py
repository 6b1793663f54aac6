"""What the KV cache occupies."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from support import config

from jaxwafer.cache.kv import CacheShape, KVFormat, allocate
from jaxwafer.errors import UserError
from jaxwafer.mesh import MeshShape, make_mesh
from jaxwafer.model import spec_from_config
from jaxwafer.partition.placement import place
from jaxwafer.partition.plan import Partition, uniform
from jaxwafer.quant.formats import FORMATS, choose

SMOLLM2 = json.loads((Path(__file__).parents[2] / "checkpoints" / "smollm2-135m.json").read_text())


def shape(fields: dict, partition: Partition, form: str, cores: int = 1) -> CacheShape:
    spec = spec_from_config(fields)
    got = place(spec, partition, lambda _, w: choose("native", w.role, FORMATS["bf16"]), cores=cores)
    return CacheShape(placement=got, format=KVFormat(name=form), block=8, blocks=5)


@pytest.mark.parametrize("form, row", [("f32", 256), ("bf16", 128), ("fp8", 65)])
def test_a_token_of_smollm2_takes_a_key_and_a_value_of_3_heads_of_64_a_layer(form, row):
    cache = shape(SMOLLM2, uniform(30, 1), form)
    assert cache.token_bytes(cache.placement.mixers[0]) == 2 * 3 * row
    assert cache.wafer_token_bytes(0) == 30 * 2 * 3 * row
    assert cache.block_bytes == 8 * 30 * 2 * 3 * row


def test_key_value_heads_that_do_not_divide_are_counted_as_stored():
    two, six = (shape(SMOLLM2, uniform(30, 1), "bf16", cores=c) for c in (2, 6))
    assert two.heads(two.placement.mixers[0].kind.cache()[0]) == (4, 64)
    assert six.heads(six.placement.mixers[0].kind.cache()[0]) == (6, 64)
    assert two.wafer_token_bytes(0) == 30 * 2 * 4 * 128


def test_a_wafer_counts_its_own_layers_and_allocates_those_of_the_fullest():
    cache = shape(config(), Partition(((0, 1, 2), (), (3, 4))), "bf16")
    each = 2 * 3 * 32
    assert [cache.wafer_token_bytes(w) for w in range(3)] == [3 * each, 0, 2 * each]
    assert cache.block_bytes == 8 * 3 * each


@pytest.mark.parametrize("form", ["f32", "bf16", "fp8"])
def test_the_arrays_have_the_bytes_that_are_counted_and_start_at_zero(form):
    cache = shape(config(), Partition(((0, 1, 2), (3, 4))), form, cores=2)
    (fields,) = cache.abstract()
    assert set(fields) == {"k", "v"} and fields["k"].values.shape == (2 * 3, 5, 8, 4, 16)
    mesh = make_mesh(MeshShape(2, 2))
    sharding = NamedSharding(mesh, PartitionSpec("wafer", None, None, "core"))
    made = allocate(cache.abstract(), jax.tree.map(lambda _: sharding, cache.abstract()))
    leaves = jax.tree.leaves(made)
    assert sum(leaf.nbytes for leaf in leaves) == 2 * cache.blocks * cache.block_bytes
    assert len(leaves) == (4 if form == "fp8" else 2)
    assert all(not np.asarray(leaf).astype(np.float32).any() for leaf in leaves)


@pytest.mark.parametrize("name, dtype", [("fp8", jnp.uint8), ("bf16", jnp.uint16), ("f32", jnp.float32)])
def test_formats_are_stored_as_the_bits_of_their_numbers(name, dtype):
    assert KVFormat(name=name).dtype == dtype


def test_an_unknown_format_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="unknown KV cache format 'int4'; choose one of fp8, bf16, f32"):
        KVFormat(name="int4")
