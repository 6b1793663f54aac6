"""Arrays in huge pages, where the system has them: a CPU reads its weights in place, and small pages cost it a sixth of
its memory bandwidth in translated addresses."""

import math
import mmap

import numpy as np

# Arrays that would not fill a few of the usual huge pages of 2 MiB are not worth one.
LEAST_BYTES = 8 << 20


def zeros(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """As np.zeros. JAX on a CPU uses the memory of what it is given where that is aligned, as this is."""
    count = math.prod(shape)
    nbytes = count * np.dtype(dtype).itemsize
    if nbytes < LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return np.zeros(shape, dtype)
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        # A kernel without them; the pages are as usual then.
        pass
    return np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)


def copied(array: np.ndarray) -> np.ndarray:
    """A contiguous copy."""
    copy = zeros(array.shape, array.dtype)
    copy[...] = array
    return copy
