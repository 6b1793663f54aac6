"""Who owns which KV block: free lists on the host."""

import numpy as np


class BlockAllocator:
    """Hands out `count` blocks of `block` tokens. A block has one owner until it is freed.

    shards: equal runs of block numbers, each kept by one core. A request's blocks are spread over them as evenly as
    what is free allows; any `count` blocks can be given out, whichever way.
    """

    def __init__(self, count: int, block: int, shards: int = 1):
        assert count % shards == 0, "blocks do not divide among the cores"
        self.count, self.block = count, block
        self._each = count // shards
        self._free = [list(range((s + 1) * self._each - 1, s * self._each - 1, -1)) for s in range(shards)]

    @property
    def free(self) -> int:
        return sum(map(len, self._free))

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def allocate(self, tokens: int) -> np.ndarray | None:
        """Blocks for `tokens` tokens, int32, or None where too few are free."""
        needed = self.needed(tokens)
        if needed > self.free:
            return None
        given, taken = [0] * len(self._free), []
        for _ in range(needed):
            # The shard that gave this request least, of those the one with most left.
            shard = min((s for s, left in enumerate(self._free) if left), key=lambda s: (given[s], -len(self._free[s])))
            given[shard] += 1
            taken.append(self._free[shard].pop())
        return np.array(taken, np.int32)

    def release(self, blocks: np.ndarray) -> None:
        for block in reversed([int(b) for b in blocks]):
            shard = self._free[block // self._each]
            assert block not in shard, "a KV block was freed twice"
            shard.append(block)
