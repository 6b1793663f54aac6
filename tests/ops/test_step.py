"""Positions and cache rows of a micro-batch's tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.ops.step import Step

BEYOND = 10  # blocks of the cache


def step(start, count, table) -> Step:
    return Step(*(jnp.asarray(a, jnp.int32) for a in (start, count, table)))


def test_positions_follow_the_start():
    got = step([0, 5], [2, 3], [[0], [1]]).positions(3)
    np.testing.assert_array_equal(got, [[0, 1, 2], [5, 6, 7]])


def test_a_token_goes_to_its_requests_block_in_the_order_of_the_table():
    block, offset = step([3, 0], [3, 3], [[7, 2], [5, 6]]).rows(3, 4, BEYOND, jnp.asarray(True))
    np.testing.assert_array_equal(block, [[7, 2, 2], [5, 5, 5]])
    np.testing.assert_array_equal(offset, [[3, 0, 1], [0, 1, 2]])


def test_pad_tokens_and_pad_rows_lie_beyond_the_cache_not_on_the_last_live_row():
    block, _ = step([3, 0, 8], [1, 0, 2], [[7, 2], [5, 6], [4, 4]]).rows(3, 4, BEYOND, jnp.asarray(True))
    np.testing.assert_array_equal(block, [[7, BEYOND, BEYOND], [BEYOND] * 3, [4, 4, BEYOND]])


def test_a_chunk_padded_past_the_end_of_the_table_stays_beyond_the_cache():
    block, _ = step([6], [2], [[7, 2]]).rows(8, 4, BEYOND, jnp.asarray(True))
    np.testing.assert_array_equal(block, [[2, 2] + [BEYOND] * 6])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_nothing_is_written_where_the_layer_is_another_wafers(count):
    block, _ = step([0], [count], [[7]]).rows(3, 4, BEYOND, jnp.asarray(False))
    np.testing.assert_array_equal(block, [[BEYOND] * 3])
