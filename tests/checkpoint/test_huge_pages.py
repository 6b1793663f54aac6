"""Weights in huge pages: zeros and copies as NumPy's, used by a CPU where they are."""

import jax
import numpy as np

from jaxwafer.checkpoint.huge_pages import LEAST_BYTES, copied, zeros


def test_a_large_array_is_zeros_of_its_type_and_can_be_written():
    array = zeros((2, LEAST_BYTES), np.dtype("int16"))
    assert array.shape == (2, LEAST_BYTES) and array.dtype == np.int16 and not array.any()
    array[1, -1] = 7
    assert array.sum() == 7


def test_a_copy_has_the_values_of_a_strided_array():
    array = np.arange(LEAST_BYTES, dtype=np.uint8).reshape(2, -1)[:, ::2]
    copy = copied(array)
    assert copy.flags.c_contiguous and np.array_equal(copy, array)


def test_a_cpu_reads_it_in_place():
    array = zeros((LEAST_BYTES,), np.uint8)
    held = jax.device_put(array, jax.devices("cpu")[0])
    assert held.unsafe_buffer_pointer() == array.ctypes.data
