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


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 40)), max_size=60))
def test_a_block_has_one_owner_at_a_time(moves):
    allocator, owned = BlockAllocator(12, 4), []
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
