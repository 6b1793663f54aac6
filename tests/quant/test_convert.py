"""Packing and conversion on the host, and the same arithmetic on the device."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxwafer.errors import UserError
from jaxwafer.quant import array, convert
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import FORMATS


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_the_even_element_is_the_low_nibble():
    nibbles = np.array([[1, 2, 3, 4], [15, 0, 0, 15]], np.uint8)
    packed = convert.pack(nibbles)
    assert packed.tolist() == [[0x21, 0x43], [0x0F, 0xF0]]
    np.testing.assert_array_equal(convert.unpack(packed), nibbles)
    np.testing.assert_array_equal(array.unpack(jnp.asarray(packed)), nibbles)


@given(st.integers(1, 5), st.integers(1, 40), st.integers(0, 2**31))
@settings(max_examples=30, deadline=None)
def test_every_packing_round_trips(rows, pairs, seed):
    nibbles = np.random.default_rng(seed).integers(0, 16, (2, rows, 2 * pairs), np.uint8)
    np.testing.assert_array_equal(convert.unpack(convert.pack(nibbles)), nibbles)
    packed = np.random.default_rng(seed).integers(0, 256, (rows, pairs), np.uint8)
    np.testing.assert_array_equal(convert.pack(convert.unpack(packed)), packed)


def test_int4_scales_are_amax_over_7():
    row = np.zeros((1, 32), np.float32)
    row[0, :5] = [7.0, -7.0, 3.4, -0.6, 0.4]
    got = convert.quantize(row, FORMATS["int4"])
    assert got.scale.tolist() == [[1.0]] and got.minimum is None
    # (stored − 8)·scale, with 7 → 15, −7 → 1, 3 → 11, −1 → 7, 0 → 8; two to a byte, the even one low.
    assert got.values[0, :3].tolist() == [0x1F, 0x7B, 0x88]


def test_int4_scales_are_each_groups_own():
    row = np.concatenate([np.full(32, 7.0), np.full(32, 70.0), np.full(3, 0.7)]).astype(np.float32)[None]
    got = convert.quantize(row, FORMATS["int4"])
    np.testing.assert_array_equal(got.scale, np.array([[1.0, 10.0, 0.1]], np.float16))
    np.testing.assert_allclose(convert.dequantize(got)[0, :67], row[0], rtol=1e-3)


def test_int4_with_a_minimum_is_scale_times_nibble_plus_minimum():
    row = np.linspace(-3.0, 12.0, 16, dtype=np.float32).repeat(2)[None]
    got = convert.quantize(row, FORMATS["int4-min"])
    assert (got.scale.tolist(), got.minimum.tolist()) == ([[1.0]], [[-3.0]])
    assert got.values[0].tolist() == [0x11 * i for i in range(16)]
    np.testing.assert_array_equal(convert.dequantize(got), row)


def test_int8_scales_are_amax_over_127_an_output():
    matrix = np.array([[127.0, -127.0, 1.4], [-1.27, 0.01, 0.0]], np.float32)
    got = convert.quantize(matrix, FORMATS["int8"])
    np.testing.assert_allclose(got.scale, [[1.0], [0.01]], rtol=1e-6)
    assert got.values.tolist() == [[127, -127, 1], [-127, 1, 0]]


def test_fp8_scales_are_amax_over_448_an_output():
    matrix = np.array([[896.0, -2.0, 0.0], [0.0, 0.0, 0.0]], np.float32)
    got = convert.quantize(matrix, FORMATS["fp8"])
    assert got.scale.tolist() == [[2.0], [0.0]]
    assert got.values.astype(np.float32).tolist() == [[448.0, -1.0, 0.0], [0.0, 0.0, 0.0]]


@given(st.integers(0, 2**31), st.floats(-30, 30))
@settings(max_examples=40, deadline=None)
def test_fp8_weights_never_overflow_to_nan(seed, log_size):
    """amax / (amax/448) can round to above 448, and the conversion beyond 464 gives NaN."""
    matrix = normal(seed, 8, 5) * np.float32(10.0**log_size)
    got = convert.quantize(matrix, FORMATS["fp8"])
    stored = got.values.astype(np.float32)
    assert np.all(np.isfinite(stored)) and np.abs(stored).max() == 448.0


@pytest.mark.parametrize(
    "name, step",
    [("int4", 1 / 14), ("int4-min", 1 / 30), ("int8", 1 / 254), ("int8-g32", 1 / 254), ("int4-g32-bf16", 1 / 14)],
)
@pytest.mark.parametrize("inputs", [32, 48, 33])
def test_integers_are_within_half_a_step_of_the_value(name, step, inputs):
    matrix, form = normal(3, 2, 6, inputs), FORMATS[name]
    got = convert.dequantize(convert.quantize(matrix, form))
    assert got.shape == (2, 6, form.groups(inputs) * form.group if form.group else inputs)
    padded = np.pad(matrix, ((0, 0), (0, 0), (0, got.shape[-1] - inputs)))
    group = form.group or inputs
    grouped = padded.reshape(2, 6, -1, group)
    reach = np.ptp(grouped, axis=-1) if form.minimum else np.abs(grouped).max(-1)
    error = np.abs(got - padded).reshape(grouped.shape).max(-1)
    # float16 scales are themselves rounded, by up to 2^-11, bfloat16 ones by up to 2^-9.
    assert np.all(error <= reach * (step + (2.0**-8 if form.scale == "bfloat16" else 2.0**-10)))


def test_fp8_is_within_half_of_a_3_bit_mantissa():
    matrix = normal(4, 8, 64)
    got = convert.dequantize(convert.quantize(matrix, FORMATS["fp8"]))
    # 2^-4 of the value, and below 2^-6 stored half of the smallest step, 2^-10.
    floor = 2.0**-10 * np.abs(matrix).max(-1, keepdims=True) / 448
    assert np.all(np.abs(got - matrix) <= np.maximum(np.abs(matrix) * 2.0**-4, floor) * (1 + 1e-5))


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros(name):
    got = convert.dequantize(convert.quantize(np.zeros((3, 48), np.float32), FORMATS[name]))
    assert not got.any()


@pytest.mark.parametrize("name", FORMATS)
def test_host_and_device_read_the_same_values(name):
    stored = convert.quantize(normal(5, 2, 6, 48), FORMATS[name])
    on_device = array.dequantize(QuantizedArray(*map(_device, vars_of(stored)), format=stored.format), jnp.float32)
    np.testing.assert_array_equal(np.asarray(on_device), convert.dequantize(stored))


def vars_of(stored: QuantizedArray):
    return stored.values, stored.scale, stored.minimum, stored.zero


def _device(part):
    return None if part is None else jnp.asarray(part)


@pytest.mark.parametrize("name", FORMATS)
def test_an_index_takes_the_same_rows_of_every_part(name):
    stored = convert.quantize(normal(6, 4, 6, 64), FORMATS[name])
    np.testing.assert_array_equal(convert.dequantize(stored[2]), convert.dequantize(stored)[2])
    assert stored.nbytes == sum(p.nbytes for p in vars_of(stored) if p is not None)


def test_a_float_array_is_stored_in_the_format_of_its_dtype():
    for name, dtype in (("f32", np.float32), ("bf16", ml_dtypes.bfloat16), ("f16", np.float16)):
        assert convert.dense(np.ones((2, 2), dtype)).format.name == name
    with pytest.raises(UserError, match="cannot store weights of dtype float64"):
        convert.dense(np.ones((2, 2)))


@pytest.mark.parametrize("name", FORMATS)
def test_conversion_to_its_own_format_is_the_same_object(name):
    stored = convert.quantize(normal(7, 6, 48), FORMATS[name])
    assert convert.convert(stored, FORMATS[name], 48) is stored


@pytest.mark.parametrize("source", FORMATS)
@pytest.mark.parametrize("target", ["f32", "int4", "int8"])
def test_conversion_starts_from_the_values_without_the_padding(source, target):
    """What a group format pads its last group with must not reach the next format's scales."""
    stored = convert.quantize(normal(8, 6, 48) + 5, FORMATS[source])
    got = convert.convert(stored, FORMATS[target], 48)
    expected = stored if source == target else convert.quantize(convert.dequantize(stored)[..., :48], FORMATS[target])
    for one, other in zip(vars_of(got), vars_of(expected), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_mxfp4_scales_are_powers_of_two_and_values_the_nearest_of_sixteen():
    row = np.zeros((1, 32), np.float32)
    row[0, :8] = [6.0, -0.5, 2.4, 2.6, 0.2, -5.1, 7.9, 1.75]
    got = convert.quantize(row, FORMATS["mxfp4"])
    assert got.scale.view(np.uint8).tolist() == [[127]]  # amax 7.9 is in [4, 8): 2^(2 − 2)
    assert convert.dequantize(got)[0, :8].tolist() == [6.0, -0.5, 2.0, 3.0, 0.0, -6.0, 6.0, 2.0]
    large = convert.quantize(row * 2.0**20, FORMATS["mxfp4"])
    assert large.scale.view(np.uint8).tolist() == [[147]] and np.array_equal(large.values, got.values)


def test_a_zero_point_makes_zero_exact():
    row = np.linspace(-3, 12, 128, dtype=np.float32)[None]
    row[0, 7] = 0.0
    got = convert.quantize(row, FORMATS["int4-g128-bf16-zero"])
    assert (got.zero.dtype, got.zero.tolist(), got.scale.tolist()) == (np.uint8, [[3]], [[1.0]])
    back = convert.dequantize(got)
    assert back[0, 7] == 0.0 and np.abs(back - row).max() <= 0.5
