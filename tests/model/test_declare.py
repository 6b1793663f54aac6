"""Where declared axes put their elements on a mesh."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxwafer.model.declare import Axis, HeadAxis, Weight, place_heads


def test_an_axis_is_sharded_as_its_name_says():
    assert Axis(name="hidden", size=8).shards(4, 2) == 1
    assert Axis(name="mlp", size=8).shards(4, 2) == 2
    assert Axis(name="vocab", size=8).shards(4, 2) == 8


def test_an_axis_that_is_not_sharded_is_never_padded():
    assert Axis(name="hidden", size=7, unit=4).placed(1).tolist() == list(range(7))


@pytest.mark.parametrize(
    "size, unit, shards, padded",
    [(1536, 32, 4, 1536), (80, 32, 2, 128), (80, 32, 3, 96), (101, 1, 15, 105), (18432, 32, 32, 18432), (5, 1, 8, 8)],
)
def test_padding_makes_whole_units_on_every_shard_and_stands_at_the_end(size, unit, shards, padded):
    index = Axis(name="mlp", size=size, unit=unit).placed(shards)
    assert index.tolist() == [*range(size), *[-1] * (padded - size)]


@pytest.mark.parametrize(
    "kv_heads, group, shards, kv, queries",
    [
        (3, 3, 1, [0, 1, 2], [[0, 1, 2], [3, 4, 5], [6, 7, 8]]),
        # 3 key/value heads over 2 cores: a whole group of zero heads.
        (3, 3, 2, [0, 1, 2, -1], [[0, 1, 2], [3, 4, 5], [6, 7, 8], [-1, -1, -1]]),
        # 2 key/value heads over 4 cores: each on two cores, which share its three query heads.
        (2, 3, 4, [0, 0, 1, 1], [[0, 1], [2, -1], [3, 4], [5, -1]]),
        # More copies than query heads: a copy with nothing to do.
        (1, 2, 3, [0, 0, 0], [[0], [1], [-1]]),
        (2, 1, 5, [0, 0, 1, 1, -1], [[0], [-1], [1], [-1], [-1]]),
    ],
)
def test_heads_that_do_not_divide_are_copied_or_padded(kv_heads, group, shards, kv, queries):
    got = place_heads(kv_heads, group, shards)
    assert (got[0].tolist(), got[1].tolist()) == (kv, queries)


@given(st.integers(1, 12), st.integers(1, 9), st.integers(1, 40))
def test_every_query_head_has_one_place_beside_its_key_value_head(kv_heads, group, shards):
    kv, queries = place_heads(kv_heads, group, shards)
    assert len(kv) % shards == 0
    kept = queries[queries >= 0]
    assert sorted(kept.tolist()) == list(range(kv_heads * group))
    owner = np.broadcast_to(kv[:, None], queries.shape)[queries >= 0]
    np.testing.assert_array_equal(owner, kept // group)
    assert set(kv[kv >= 0].tolist()) == set(range(kv_heads))
    assert np.all(queries[kv < 0] == -1)


def test_a_head_axis_maps_whole_heads():
    shared = dict(kv_heads=3, group=1, unit=2, size=6)
    assert HeadAxis(name="kv_heads", **shared).placed(2).tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert HeadAxis(name="heads", **shared).placed(2).tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    shared = dict(kv_heads=1, group=2, unit=2)
    assert HeadAxis(name="kv_heads", size=2, **shared).placed(2).tolist() == [0, 1, 0, 1]
    assert HeadAxis(name="heads", size=4, **shared).placed(2).tolist() == [0, 1, 2, 3]


def test_a_weight_has_the_shape_and_size_of_the_checkpoint():
    axes = (Axis(name="mlp", size=80, unit=32), Axis(name="hidden", size=48))
    weight = Weight(name="up", hub="mlp.up_proj.weight", axes=axes, role="mlp")
    assert (weight.shape, weight.size) == ((80, 48), 3840)
