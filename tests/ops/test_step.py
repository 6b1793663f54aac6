"""Positions and cache rows of a micro-batch's tokens."""

import jax.numpy as jnp
import numpy as np

from jaxwafer.ops.step import Step

NOWHERE = -1


def step(start, count, table) -> Step:
    return Step(*(jnp.asarray(a, jnp.int32) for a in (start, count, table, range(len(start)))))


def test_positions_follow_the_start():
    got = step([0, 5], [2, 3], [[0], [1]]).positions(3)
    np.testing.assert_array_equal(got, [[0, 1, 2], [5, 6, 7]])


def test_a_token_goes_to_its_requests_block_in_the_order_of_the_table():
    block, offset = step([3, 0], [3, 3], [[7, 2], [5, 6]]).rows(3, 4)
    np.testing.assert_array_equal(block, [[7, 2, 2], [5, 5, 5]])
    np.testing.assert_array_equal(offset, [[3, 0, 1], [0, 1, 2]])


def test_pad_tokens_and_pad_rows_belong_to_no_block_not_to_the_last_live_row():
    block, _ = step([3, 0, 8], [1, 0, 2], [[7, 2], [5, 6], [4, 4]]).rows(3, 4)
    np.testing.assert_array_equal(block, [[7, NOWHERE, NOWHERE], [NOWHERE] * 3, [4, 4, NOWHERE]])


def test_a_chunk_padded_past_the_end_of_the_table_belongs_to_no_block():
    block, _ = step([6], [2], [[7, 2]]).rows(8, 4)
    np.testing.assert_array_equal(block, [[2, 2] + [NOWHERE] * 6])


def test_real_tokens_are_the_first_count():
    np.testing.assert_array_equal(step([4, 0], [2, 0], [[0], [0]]).real(3), [[True, True, False], [False] * 3])
