"""Who owns which KV block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxwafer.cache.blocks import BlockAllocator


@pytest.mark.parametrize("tokens, blocks", [(0, 0), (1, 1), (7, 1), (8, 1), (9, 2), (16, 2), (17, 3)])
def test_tokens_take_whole_blocks(tokens, blocks):
    allocator = BlockAllocator(4, 8)
    assert allocator.needed(tokens) == len(allocator.allocate(tokens)) == blocks
    assert allocator.free == 4 - blocks


def test_too_many_tokens_get_nothing_and_take_nothing():
    allocator = BlockAllocator(4, 8)
    first = allocator.allocate(17)
    assert allocator.allocate(9) is None and allocator.free == 1
    assert allocator.allocate(8) is not None and allocator.free == 0
    allocator.release(first)
    assert allocator.free == 3


def test_a_block_freed_twice_is_caught():
    allocator = BlockAllocator(4, 8)
    blocks = allocator.allocate(10)
    allocator.release(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        allocator.release(blocks)


@pytest.mark.parametrize("tokens", [1, 4, 5, 17, 24])
def test_a_requests_blocks_are_spread_evenly_over_the_shards(tokens):
    allocator = BlockAllocator(24, 1, shards=4)
    for _ in range(24 // tokens):
        on = np.bincount(allocator.allocate(tokens) // 6, minlength=4)
        assert on.max() - on.min() <= 1
    assert allocator.free == 24 % tokens


def test_requests_start_where_most_is_left():
    allocator = BlockAllocator(8, 1, shards=4)
    assert [int(allocator.allocate(1)[0]) for _ in range(8)] == [0, 2, 4, 6, 1, 3, 5, 7]


def test_what_is_left_is_given_out_however_it_lies():
    """The capacity that is printed counts every free block, so none may be refused for the shard it is in."""
    allocator = BlockAllocator(8, 1, shards=4)
    requests = [allocator.allocate(1) for _ in range(8)]
    for blocks in requests[1::4]:
        allocator.release(blocks)
    assert allocator.free == 2
    assert sorted(allocator.allocate(2).tolist()) == [2, 3] and allocator.allocate(1) is None


@pytest.mark.parametrize("shards", [1, 3])
@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_a_block_has_one_owner_at_a_time(shards, moves):
    allocator, owned = BlockAllocator(12, 4, shards), []
    for take, amount in moves:
        if take:
            blocks = allocator.allocate(amount)
            assert (blocks is None) == (-(-amount // 4) > 12 - sum(map(len, owned)))
            if blocks is not None:
                owned.append(blocks)
        elif owned:
            allocator.release(owned.pop(amount % len(owned)))
        held = np.concatenate(owned) if owned else np.zeros(0, np.int32)
        assert len(set(held.tolist())) == len(held) and allocator.free == 12 - len(held)
        assert np.all((held >= 0) & (held < 12))
