"""Who owns which KV block: a free list on the host."""

import numpy as np


class BlockAllocator:
    """Hands out `count` blocks of `block` tokens. A block has one owner until it is freed."""

    def __init__(self, count: int, block: int):
        self.count, self.block = count, block
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def allocate(self, tokens: int) -> np.ndarray | None:
        """Blocks for `tokens` tokens, int32, or None where too few are free."""
        needed = self.needed(tokens)
        if needed > len(self._free):
            return None
        return np.array([self._free.pop() for _ in range(needed)], np.int32)

    def release(self, blocks: np.ndarray) -> None:
        freed = [int(b) for b in blocks]
        assert not set(freed) & set(self._free), "a KV block was freed twice"
        self._free.extend(reversed(freed))
