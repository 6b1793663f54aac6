"""RoPE frequencies of the published variants."""

import math

import numpy as np
import pytest

from jaxwafer.errors import UserError
from jaxwafer.model.rope import LinearScaling, Llama3Scaling, Rope, YarnScaling, rope_from_config

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip
YARN = {"type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096}  # fmt: skip


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
    np.testing.assert_allclose(scaling.apply(frequency, 10000.0), expected, rtol=1e-12)


def test_llama3_frequencies_of_the_8b_model():
    got = rope_from_config({"rope_theta": 500000.0, "rope_scaling": LLAMA3}, dims=128).frequencies()
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(got[:29], plain[:29], rtol=1e-6)  # wavelengths up to 2048
    np.testing.assert_allclose(got[35:], plain[35:] / 8, rtol=1e-6)  # from 8192
    assert np.all((got[29:35] < plain[29:35]) & (got[29:35] > plain[29:35] / 8))


def test_linear_scaling_stretches_every_wavelength():
    rope = rope_from_config({"rope_scaling": {"type": "linear", "factor": 4}}, dims=4)
    assert rope.scaling == LinearScaling(factor=4.0) and rope.magnitude == 1.0
    np.testing.assert_allclose(rope.frequencies(), [1 / 4, 0.01 / 4], rtol=1e-7)


def test_yarn_frequencies_of_deepseek_v3():
    """Pair i turns 4096 · 10000^(−i/32) / 2π times in 4096 positions: 32 times at i = 10.47, once at i = 22.51. Rounded
    outwards, pairs up to 10 keep their frequency, those from 23 are stretched by 40, and i loses (i − 10)/13 of it."""
    got = rope_from_config({"rope_theta": 10000, "rope_scaling": YARN}, dims=64).frequencies()
    plain = 10000.0 ** -(np.arange(32) / 32)
    np.testing.assert_allclose(got[:11], plain[:11], rtol=1e-6)
    np.testing.assert_allclose(got[23:], plain[23:] / 40, rtol=1e-6)
    np.testing.assert_allclose(got[11], plain[11] * (12 / 13 + 1 / 13 / 40), rtol=1e-6)
    np.testing.assert_allclose(got[22], plain[22] * (1 / 13 + 12 / 13 / 40), rtol=1e-6)


def test_yarn_frequencies_of_kimi_k2_whose_bounds_are_the_same():
    """beta_fast = beta_slow = 1: at theta 50000 one turn is at pair 19.16: up to 19 are kept, from 20 stretched."""
    fields = {"rope_theta": 50000.0, "rope_scaling": YARN | {"beta_fast": 1.0, "factor": 32.0}}
    got, plain = rope_from_config(fields, dims=64).frequencies(), 50000.0 ** -(np.arange(32) / 32)
    np.testing.assert_allclose(got, plain / np.where(np.arange(32) < 20, 1, 32), rtol=1e-6)


def test_yarn_without_rounding_blends_between_the_exact_indices():
    """gpt-oss: theta 150000, 32 pairs: 32 turns at pair 8.09, one turn at pair 17.40."""
    fields = {"rope_theta": 150000, "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0,
              "beta_slow": 1.0, "truncate": False, "original_max_position_embeddings": 4096}}  # fmt: skip
    rope = rope_from_config(fields, dims=64)
    low, high = (32 * math.log(4096 / (2 * math.pi * turns)) / math.log(150000) for turns in (32, 1))
    assert (round(low, 2), round(high, 2)) == (8.09, 17.40)
    lost = np.clip((np.arange(32) - low) / (high - low), 0, 1)
    plain = 150000.0 ** -(np.arange(32) / 32)
    np.testing.assert_allclose(rope.frequencies(), plain * (1 - lost) + plain / 32 * lost, rtol=1e-6)
    assert rope.magnitude == pytest.approx(1.3465735902799727)  # 0.1 ln 32 + 1


@pytest.mark.parametrize(
    "changes, magnitude, score",
    [
        ({}, 1.0, 1.3688879454113937**2),  # mscale = 0.1 ln 40 + 1, of itself
        ({"mscale_all_dim": None}, 1.3688879454113937, 1.0),
        ({"mscale": None}, 1.3688879454113937, 1.3688879454113937**2),
        ({"mscale": 0, "mscale_all_dim": 0}, 1.3688879454113937, 1.0),
        ({"mscale_all_dim": 0.707}, 1.3688879454113937 / 1.2608037774058554, 1.2608037774058554**2),
        ({"attention_factor": 1.5}, 1.5, 1.3688879454113937**2),
        ({"factor": 1.0}, 1.0, 1.0),
        ({"factor": 0.5}, 1.0, 1.0),
    ],
)
def test_yarns_factors_of_rotated_elements_and_of_scores(changes, magnitude, score):
    scaling = rope_from_config({"rope_scaling": YARN | changes}, dims=64).scaling
    assert scaling.magnitude == pytest.approx(magnitude) and scaling.score_factor == pytest.approx(score)


def test_yarns_bounds_are_32_turns_and_one_where_they_are_missing_or_zero():
    for missing in (None, 0):
        rope = rope_from_config({"rope_scaling": YARN | {"beta_fast": missing, "beta_slow": missing}}, dims=64)
        assert rope.scaling == YarnScaling(factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0)


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


@pytest.mark.parametrize(
    "fields", [{}, {"rope_theta": None}, {"rope_scaling": None}, {"rope_scaling": {"type": "default"}}]
)
def test_the_default_is_plain_rope_of_base_10000(fields):
    assert rope_from_config(fields, dims=64) == Rope(theta=10000.0, dims=64)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "RoPE type 'dynamic' is not supported"),
        ({"rope_scaling": {"type": ["yarn"]}}, "RoPE type ['yarn'] is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "lacks 'factor'"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "lacks 'original_max_position_embeddings'"),
        ({"rope_scaling": YARN | {"factor": None}}, "lacks 'factor'"),
        ({"rope_scaling": YARN | {"beta_fast": 1, "beta_slow": 2}}, "'beta_fast' must not be below 'beta_slow'"),
        ({"rope_scaling": YARN | {"truncate": 1}}, "'truncate' should be true or false, not 1"),
        ({"rope_scaling": YARN | {"mscale": -1.0}}, "'mscale' should be a positive number, not -1.0"),
        ({"rope_scaling": YARN | {"attention_factor": 0}}, "'attention_factor' should be a positive number, not 0"),
        ({"rope_scaling": YARN | {"finetuned": True}}, "'finetuned' is not understood"),
        ({"rope_theta": 1.0}, "'rope_theta' should be above 1, not 1"),
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
