"""Counted bytes and FLOPs against numbers worked out by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
from support import config

from jaxwafer.cache.kv import CacheShape, KVFormat
from jaxwafer.model import spec_from_config
from jaxwafer.partition.placement import place
from jaxwafer.partition.plan import Partition, uniform
from jaxwafer.quant.formats import FORMATS, POLICIES, choose
from jaxwafer.roofline.counters import Counts, Traffic, decode_flops, decode_traffic, imbalance, real_token_bytes

SMOLLM2 = json.loads((Path(__file__).parents[2] / "checkpoints" / "smollm2-135m.json").read_text())
# Of SmolLM2-135M: hidden 576, 9 query and 3 key/value heads of 64, 1536 columns, 30 layers, 49152 words, tied.
ATTENTION, MLP = 576 * 64 * (9 + 3 + 3 + 9), 3 * 576 * 1536
NORM, HEAD = 576, 49152 * 576
ROW = 2 * 3 * 64  # elements of a token's key and value in a layer


def cache(fields=SMOLLM2, partition: Partition | None = None, cores: int = 1, policy="native", kv="bf16") -> CacheShape:
    spec = spec_from_config(fields)
    partition = partition or uniform(len(spec.layers), 1)
    got = place(spec, partition, lambda _, w: choose(policy, w.role, FORMATS["bf16"]), cores=cores)
    return CacheShape(placement=got, format=KVFormat(name=kv), block=32, blocks=4)


def tally(busy, tokens, kv_rows) -> Counts:
    """Of wafers in a round of one phase, with one stack of MLPs and no experts."""
    columns = (np.array(column, float)[:, None] for column in (busy, tokens, kv_rows))
    return Counts(*columns, experts=np.zeros((len(busy), 1)))


def test_a_tick_of_smollm2_on_one_device():
    """One tick with two requests that read 64 rows between them."""
    got = decode_traffic(cache(), 2, tally([1], [2], [64]))
    matrices = 2 * (30 * (ATTENTION + MLP) + HEAD) + 2 * 2 * 576  # the head once, two rows of the embedding
    assert got.weights == {"f32": 4 * 61 * NORM, "bf16": matrices}
    assert got.kv == 30 * (64 + 2) * ROW * 2
    assert (got.hops, got.padding) == (0, 0)
    assert got.bytes == 4 * 61 * NORM + matrices + 30 * 66 * ROW * 2
    assert got.flops == 2 * 2 * (30 * (ATTENTION + MLP) + HEAD) + 30 * 4 * 9 * 64 * 64


def test_everything_grows_with_what_was_tallied():
    one, ten = (decode_traffic(cache(), 2, tally([n], [2 * n], [64 * n])) for n in (1, 10))
    assert (ten.bytes, ten.flops, ten.kv) == (10 * one.bytes, 10 * one.flops, 10 * one.kv)
    assert decode_traffic(cache(), 2, tally([0], [0], [0])).bytes == 0


@pytest.mark.parametrize("kv, row", [("f32", 256), ("bf16", 128), ("fp8", 65)])
def test_a_row_of_the_cache_counts_its_scale(kv, row):
    assert decode_traffic(cache(kv=kv), 2, tally([1], [1], [32])).kv == 30 * 33 * 6 * row


def test_wafers_count_their_own_layers_and_hops_leave_all_but_the_last():
    shape = cache(partition=uniform(30, 4), cores=1)
    got = decode_traffic(shape, 2, tally([3, 3, 3, 2], [5, 5, 5, 4], [96, 96, 96, 64]))
    layers = np.array([8, 8, 7, 7])
    ticks = np.sum(layers * [3, 3, 3, 2])
    # Norms: two a layer, and at each of the last wafer's ticks the final one on all four wafers.
    assert got.weights["f32"] == 4 * NORM * (2 * ticks + 2 * 4)
    assert got.weights["bf16"] == 2 * (ticks * (ATTENTION + MLP) + 2 * HEAD) + 5 * 2 * 576
    assert got.kv == np.sum(layers * [101, 101, 101, 68]) * ROW * 2
    # A hop carries the residual, the position and the count.
    assert got.hops == 15 * (576 * 2 + 8)


def test_padding_of_9_query_and_3_key_value_heads_over_2_cores_is_a_fourth_group():
    got = decode_traffic(cache(cores=2), 2, tally([1], [1], [32]))
    stored = ATTENTION * 4 // 3
    assert got.weights["bf16"] == 2 * (30 * (stored + MLP) + HEAD) + 2 * 576
    assert got.kv == 30 * 33 * (2 * 4 * 64) * 2
    assert got.padding == pytest.approx(2 * 30 * (stored - ATTENTION) + 30 * 33 * (2 * 64) * 2)
    # FLOPs are those of the model.
    assert got.flops == decode_traffic(cache(), 2, tally([1], [1], [32])).flops


def test_copies_of_key_value_heads_are_padding():
    """Six cores: each of the three key/value heads twice, its three queries as two and one."""
    shape = cache(cores=6)
    stack = shape.placement.mixers[0]
    assert (shape.token_bytes(stack), real_token_bytes(shape, stack)) == (2 * 6 * 64 * 2, 2 * 3 * 64 * 2)
    got = decode_traffic(shape, 2, tally([1], [1], [0]))
    queries, kv = 576 * 64 * (12 - 9) * 2, 576 * 64 * (6 - 3) * 2
    assert got.padding == pytest.approx(2 * 30 * (queries + kv) + 30 * 2 * 3 * 64 * 2)


def test_a_head_of_its_own_is_read_instead_of_the_embedding():
    fields = SMOLLM2 | {"tie_word_embeddings": False}
    tied, own = (decode_traffic(cache(f), 2, tally([1], [1], [0])) for f in (SMOLLM2, fields))
    assert (own.weights, own.flops) == (tied.weights, tied.flops)


def test_a_wafer_without_layers_reads_its_share_of_the_vocabulary_alone():
    shape = cache(partition=Partition((tuple(range(30)), ())))
    got = decode_traffic(shape, 2, tally([1, 1], [1, 1], [32, 32]))
    assert got.weights["bf16"] == 2 * (30 * (ATTENTION + MLP) + HEAD) + 2 * 576
    assert got.kv == 30 * 33 * ROW * 2


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("wafers, cores", [(1, 1), (3, 2), (2, 5), (4, 3)])
@pytest.mark.parametrize("tied", [True, False])
def test_a_tick_never_counts_more_bytes_than_are_on_the_devices(policy, wafers, cores, tied):
    fields = config(tie_word_embeddings=tied)
    shape = cache(fields, uniform(5, wafers), cores, policy, "fp8")
    got = decode_traffic(shape, 4, tally([1] * wafers, [1] * wafers, [0] * wafers))
    embedding = shape.placement.globals["embedding"]
    row = embedding.wafer_bytes(wafers, cores) * wafers / len(embedding.index[0])
    # A tied table is read as the head, and one row again as the embedding.
    counted = sum(got.weights.values()) - (row if tied else 0)
    assert (
        counted
        <= sum(shape.placement.weight_bytes(w) for w in range(wafers))
        <= wafers * shape.placement.allocated_bytes
    )
    assert 0 <= got.padding < got.bytes


def test_kv_bytes_of_a_full_cache_are_the_bytes_it_allocates():
    """Every block read once on wafers of equal depth."""
    shape = cache(partition=uniform(30, 3), cores=2)
    rows = shape.block * shape.blocks
    got = decode_traffic(shape, 2, tally([0] * 3, [0] * 3, [rows] * 3))
    assert got.kv == 3 * shape.blocks * shape.block_bytes


def test_flops_alone_are_those_of_the_traffic():
    shape, counts = cache(partition=uniform(30, 2)), tally([2, 2], [3, 3], [64, 64])
    alone = decode_flops(shape.placement, counts)
    assert alone == decode_traffic(shape, 2, counts).flops
    assert alone == 2 * 3 * (30 * (ATTENTION + MLP) + HEAD) + 30 * 4 * 9 * 64 * 64


def test_the_total_is_the_sum_of_the_parts():
    components = {"mixers": 4.0, "mlps": 6.0, "rest": 2.0}
    traffic = Traffic(
        weights={"int4": 5.0, "fp8": 7.0}, components=components, kv=11.0, state=17.0, hops=13.0, padding=3.0, flops=1.0
    )
    assert traffic.bytes == 53.0
    assert traffic.shares == {"mixers": 32.0, "mlps": 6.0, "rest": 15.0}


def test_weights_by_component():
    """One wafer, one tick: 30 layers' attention and MLPs, the head with its norm and one row of the embedding."""
    got = decode_traffic(cache(partition=uniform(30, 1)), 2, tally([1], [1], [32])).components
    norms = 4 * NORM  # float32
    mixers, mlps = (30 * (2 * matrices + norms) for matrices in (ATTENTION, MLP))
    assert got == {"mixers": mixers, "mlps": mlps, "rest": 2 * (HEAD + 576) + norms}


def test_imbalance_is_the_busiest_wafers_bytes_a_tick_over_the_mean():
    even = cache(partition=uniform(30, 3))
    assert imbalance(even, tally([1] * 3, [1] * 3, [32] * 3)) == pytest.approx(1.0)
    uneven = cache(partition=Partition((tuple(range(20)), tuple(range(20, 30)), ())))
    assert imbalance(uneven, tally([1] * 3, [1] * 3, [32] * 3)) == pytest.approx(2.0)
    assert imbalance(uneven, tally([0] * 3, [1] * 3, [0] * 3)) == pytest.approx(2.0)
