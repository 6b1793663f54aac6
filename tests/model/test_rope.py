"""RoPE frequencies of the published variants."""

import math

import numpy as np
import pytest

from jaxwafer.errors import UserError
from jaxwafer.model.rope import Llama3Scaling, Rope, rope_from_config

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


def test_frequencies_are_powers_of_theta():
    np.testing.assert_allclose(Rope(theta=100.0, dims=4).frequencies(), [1.0, 0.1], rtol=1e-7)
    got = Rope(theta=10000.0, dims=8).frequencies()
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, [1.0, 0.1, 0.01, 0.001], rtol=1e-6)


def test_llama3_keeps_short_wavelengths_stretches_long_ones_and_blends_between():
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    # Wavelengths of 1000 (shorter than 8192/4), 100000 (longer than 8192/1), and 8192/2.5, halfway in turns.
    wavelength = np.array([1000.0, 100_000.0, 8192 / 2.5])
    frequency = 2 * math.pi / wavelength
    expected = frequency * [1.0, 1 / 8, 0.5 + 0.5 / 8]
    np.testing.assert_allclose(scaling.apply(frequency), expected, rtol=1e-12)


def test_llama3_frequencies_of_the_8b_model():
    got = rope_from_config({"rope_theta": 500000.0, "rope_scaling": LLAMA3}, dims=128).frequencies()
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(got[:29], plain[:29], rtol=1e-6)  # wavelengths up to 2048
    np.testing.assert_allclose(got[35:], plain[35:] / 8, rtol=1e-6)  # from 8192
    assert np.all((got[29:35] < plain[29:35]) & (got[29:35] > plain[29:35] / 8))


@pytest.mark.parametrize(
    "fields",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 500000}},
        {"rope_theta": 5e5, "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_type"} | {"type": "llama3"}},
    ],
)
def test_old_and_new_spellings_are_one_rope(fields):
    scaling = Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    assert rope_from_config(fields, dims=64) == Rope(theta=5e5, dims=64, scaling=scaling)


@pytest.mark.parametrize("fields", [{}, {"rope_theta": None}, {"rope_scaling": None}, {"rope_scaling": {"type": "default"}}])
def test_the_default_is_plain_rope_of_base_10000(fields):
    assert rope_from_config(fields, dims=64) == Rope(theta=10000.0, dims=64)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "RoPE type 'yarn' is not supported"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "RoPE type 'linear' is not supported"),
        ({"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "'factor' is not understood"),
        ({"rope_scaling": LLAMA3 | {"attention_factor": 2.0}}, "'attention_factor' is not understood"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks 'low_freq_factor'"),
        ({"rope_scaling": LLAMA3 | {"factor": None}}, "lacks 'factor'"),
        ({"rope_scaling": LLAMA3 | {"factor": "8"}}, "'factor' should be a positive number, not '8'"),
        ({"rope_scaling": LLAMA3 | {"factor": 0}}, "'factor' should be a positive number, not 0"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "'high_freq_factor' must be above 'low_freq_factor'"),
        ({"rope_theta": "1e4"}, "'rope_theta' should be a positive number, not '1e4'"),
        ({"rope_theta": -1.0}, "'rope_theta' should be a positive number, not -1.0"),
        ({"rope_theta": True}, "'rope_theta' should be a positive number, not True"),
        ({"rope_theta": math.inf}, "'rope_theta' should be a positive number, not inf"),
        ({"rope_scaling": "linear"}, "'rope_scaling' should be an object, not 'linear'"),
        ({"rope_parameters": [1]}, "'rope_parameters' should be an object, not [1]"),
    ],
)
def test_rope_that_cannot_be_followed_exactly_is_refused_by_field(fields, message):
    with pytest.raises(UserError) as error:
        rope_from_config(fields, dims=64)
    assert message in str(error.value)
