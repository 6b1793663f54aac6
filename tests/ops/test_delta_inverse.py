"""The triangular systems of the delta rule's chunks, against float64."""

import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.ops.delta_rule.reference import inverse


@pytest.mark.parametrize("size", [16, 48, 64])
def test_the_inverse_of_a_unit_triangle(size):
    """What is on and above the diagonal does not count. All ones have powers of 10^18 and an inverse of −1, 0, 1."""
    lower = 0.3 * np.random.default_rng(0).uniform(-1, 1, (2, 3, size, size)).astype(np.float32)
    expected = np.linalg.inv(np.eye(size) + np.tril(lower.astype(np.float64), -1))
    np.testing.assert_allclose(inverse(jnp.array(lower)), expected, atol=1e-6)
    ones = inverse(jnp.ones((1, 1, size, size), jnp.float32))[0, 0]
    np.testing.assert_array_equal(ones, np.eye(size) - np.eye(size, k=-1))
