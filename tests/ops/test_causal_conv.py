"""The causal depthwise convolution and the inputs it carries."""

import jax
import numpy as np
import pytest

from jaxwafer.ops.causal_conv import causal_conv

run = jax.jit(causal_conv)
TAPS, CHANNELS = 4, 3
WEIGHT = np.random.default_rng(0).standard_normal((CHANNELS, TAPS)).astype(np.float32)


def noise(*shape, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def counts(*values):
    return np.array(values, np.int32)


def test_it_is_numpys_convolution_of_each_channel():
    x = noise(2, 9, CHANNELS)
    y, past = run(x, np.zeros((2, TAPS - 1, CHANNELS), np.float32), WEIGHT, counts(9, 9))
    for request in range(2):
        for channel in range(CHANNELS):
            whole = np.convolve(x[request, :, channel], WEIGHT[channel, ::-1])[:9]
            np.testing.assert_allclose(y[request, :, channel], whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(past, x[:, -3:])


def test_an_output_sees_nothing_after_it():
    x, past = noise(1, 6, CHANNELS), noise(1, 3, CHANNELS, seed=2)
    before, _ = run(x, past, WEIGHT, counts(6))
    x[:, 4:] = np.inf
    after, _ = run(x, past, WEIGHT, counts(6))
    np.testing.assert_array_equal(before[:, :4], after[:, :4])


@pytest.mark.parametrize("count", range(7))
def test_the_past_is_of_the_last_real_inputs(count):
    x, past = noise(1, 6, CHANNELS), noise(1, 3, CHANNELS, seed=2)
    x[:, count:] = np.nan
    _, after = run(x, past, WEIGHT, counts(count))
    np.testing.assert_array_equal(after, np.concatenate([past, x], 1)[:, count : count + 3])


@pytest.mark.parametrize("chunks", [[1] * 10, [1, 9], [4, 6], [2, 3, 5]])
def test_any_split_gives_the_same(chunks):
    x, past = noise(2, 10, CHANNELS), noise(2, 3, CHANNELS, seed=2)
    expected, last = run(x, past, WEIGHT, counts(10, 10))
    found, start = [], 0
    for length in chunks:
        y, past = run(x[:, start : start + length], past, WEIGHT, counts(length, length))
        found.append(y)
        start += length
    np.testing.assert_allclose(np.concatenate(found, 1), expected, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(past, last)
