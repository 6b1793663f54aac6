"""RMS norm."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.ops import norm

rms_norm = jax.jit(norm.rms_norm, static_argnums=2)


def test_rows_are_divided_by_their_root_mean_square_and_weighted():
    x = jnp.asarray([[[3.0, 4.0], [0.0, 0.0]]])
    got = rms_norm(x, jnp.asarray([1.0, 2.0]), 1e-12)
    root = np.sqrt(12.5)
    np.testing.assert_allclose(got, [[[3 / root, 8 / root], [0, 0]]], rtol=1e-6)


def test_eps_is_added_to_the_mean_square():
    np.testing.assert_allclose(rms_norm(jnp.asarray([[1.0, -1.0]]), jnp.ones(2), 3.0), [[0.5, -0.5]])


def test_bfloat16_is_worked_on_in_float32_and_given_back():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 300)) * 1e3).astype(jnp.bfloat16)
    got = rms_norm(x, jnp.full(300, 1.5), 1e-5)
    wide = np.asarray(x).astype(np.float64)
    expected = wide / np.sqrt(np.mean(wide**2, -1, keepdims=True) + 1e-5) * 1.5
    assert got.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(got).astype(np.float64), expected, rtol=2**-8)
