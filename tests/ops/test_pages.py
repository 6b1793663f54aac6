"""Rows of the paged KV cache."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxwafer.ops import pages as ops
from jaxwafer.ops.pages import Pages, power_of_two

LAYERS, BLOCKS, BLOCK, HEADS, DIM = 2, 5, 4, 3, 8
to_fp8, read = jax.jit(ops.to_fp8), jax.jit(ops.read, static_argnums=3)
DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "fp8": jnp.float8_e4m3fn}


def pages(form: str) -> Pages:
    """A cache whose every row has its own value."""
    shape = (LAYERS, BLOCKS, BLOCK, HEADS)
    values = np.random.default_rng(0).integers(-16, 17, (*shape, DIM)).astype(np.float32)
    exponent = jnp.asarray(np.random.default_rng(1).integers(-4, 5, shape), jnp.int8) if form == "fp8" else None
    return Pages(values=jnp.asarray(values).astype(DTYPES[form]), exponent=exponent)


def host(cache: Pages) -> np.ndarray:
    values = np.asarray(cache.values).astype(np.float32)
    return values if cache.exponent is None else values * 2.0 ** np.asarray(cache.exponent, np.float32)[..., None]


def rows(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(2).integers(-15, 16, (*shape, HEADS, DIM)) * 0.25, jnp.float32)


def whole(*values) -> tuple[jax.Array, ...]:
    return tuple(jnp.asarray(v, jnp.int32) for v in values)


@pytest.mark.parametrize("form", DTYPES)
def test_read_gives_a_requests_blocks_in_the_order_of_its_table(form):
    cache = pages(form)
    (layer, blocks) = whole(1, [[3, 0], [4, 4]])
    got = read(cache, layer, blocks, jnp.float32)
    expected = host(cache)[1][np.asarray(blocks)].reshape(2, 2 * BLOCK, HEADS, DIM)
    np.testing.assert_array_equal(got, expected)
    assert read(cache, layer, blocks, jnp.bfloat16).dtype == jnp.bfloat16


def test_powers_of_two_are_exact():
    exponents = np.arange(-126, 128)
    for turn in (power_of_two, jax.jit(power_of_two)):
        np.testing.assert_array_equal(turn(jnp.asarray(exponents, jnp.int8)), np.ldexp(np.float32(1), exponents))


def scaled(row) -> tuple[np.ndarray, int]:
    values, exponent = to_fp8(jnp.asarray(row, jnp.float32)[None])
    return np.asarray(values[0]).astype(np.float32), int(exponent[0])


@pytest.mark.parametrize(
    "largest, exponent",
    [(448.0, 0), (449.0, 1), (447.0, 0), (224.0, -1), (225.0, 0), (1.0, -8), (0.875, -9), (0.876, -8), (896.0, 1),
     (448.0 * 2**40, 40), (448.0 * 2.0**-40, -40)],
)  # fmt: skip
def test_the_exponent_is_the_smallest_for_which_the_row_fits(largest, exponent):
    values, got = scaled([0.0, -largest, largest / 3])
    assert got == exponent and abs(values[1]) <= 448


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-(2.0**90), 2.0**90, width=32), min_size=1, max_size=4), st.integers(-20, 20))
def test_fp8_rows_are_the_rounded_values_under_the_smallest_power_of_two(row, shift):
    row = np.ldexp(np.array(row + [1.0], np.float32), shift)
    values, exponent = scaled(row)
    largest = float(np.abs(row).max())
    assert largest <= 448 * 2.0**exponent
    assert largest > 448 * 2.0 ** (exponent - 1)
    expected = (row.astype(np.float64) * 2.0**-exponent).astype(np.float32).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(values, expected.astype(np.float32))


def test_a_zero_row_is_zero():
    values, _ = scaled(np.zeros(4))
    assert not values.any()


def test_infinities_and_the_largest_numbers_are_clipped_not_nan():
    top = np.finfo(np.float32).max
    values, exponent = scaled([np.inf, -np.inf, 0.0, 1.0])
    np.testing.assert_array_equal(values[:3], [448, -448, 0])
    assert exponent == 120
    assert np.all(np.isfinite(scaled([top, -top])[0]))


def test_tiny_rows_lose_range_not_sign_or_finiteness():
    values, exponent = scaled([1e-36, -1e-37])
    assert exponent == -120 and np.all(np.isfinite(values)) and values[0] > 0 > values[1]
