"""Rotation of queries and keys."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.layers.rope import angles, rotate
from jaxwafer.model.rope import Rope, YarnScaling


def turned(x, positions, rope):
    def run(x, positions):
        return rotate(x, *angles(rope, positions), interleaved=rope.interleaved)

    return np.asarray(jax.jit(run)(np.asarray(x, np.float32), np.asarray(positions, np.int32)))


def test_element_i_is_paired_with_i_plus_half():
    """At position 1 with theta 10000 and 4 elements the angles are 1 and 0.01."""
    got = turned(np.array([1.0, 10.0, 2.0, 20.0]).reshape(1, 1, 1, 4), [[1]], Rope(theta=10000.0, dims=4))
    c, s = np.cos([1, 0.01]), np.sin([1, 0.01])
    expected = [c[0] - 2 * s[0], 10 * c[1] - 20 * s[1], 2 * c[0] + s[0], 20 * c[1] + 10 * s[1]]
    np.testing.assert_allclose(got.reshape(4), expected, rtol=1e-6)


def test_interleaved_elements_are_paired_with_their_neighbours():
    rope = Rope(theta=10000.0, dims=4, interleaved=True)
    got = turned(np.array([1.0, 2.0, 10.0, 20.0, 7.0]).reshape(1, 1, 1, 5), [[1]], rope)
    c, s = np.cos([1, 0.01]), np.sin([1, 0.01])
    expected = [c[0] - 2 * s[0], 2 * c[0] + s[0], 10 * c[1] - 20 * s[1], 20 * c[1] + 10 * s[1], 7.0]
    np.testing.assert_allclose(got.reshape(5), expected, rtol=1e-6)


def test_what_is_rotated_has_the_variants_magnitude_and_the_rest_has_not():
    scaling = YarnScaling(factor=4.0, original_max_position=64, attention_factor=1.25)
    x = np.random.default_rng(0).standard_normal((1, 2, 1, 6)).astype(np.float32)
    got = turned(x, [[0, 0]], Rope(theta=100.0, dims=4, scaling=scaling))
    np.testing.assert_allclose(got, x * np.float32([1.25] * 4 + [1] * 2), rtol=1e-6)


def test_position_zero_turns_nothing_and_elements_beyond_dims_are_never_turned():
    x = np.random.default_rng(0).standard_normal((2, 3, 2, 10)).astype(np.float32)
    got = turned(x, [[0, 1, 2], [7, 0, 9]], Rope(theta=100.0, dims=6))
    np.testing.assert_array_equal(got[0, 0], x[0, 0])
    np.testing.assert_array_equal(got[1, 1], x[1, 1])
    np.testing.assert_array_equal(got[..., 6:], x[..., 6:])
    assert np.all(got[0, 1, :, 0] != x[0, 1, :, 0])


def test_scores_depend_on_the_distance_alone():
    rng, rope = np.random.default_rng(1), Rope(theta=10000.0, dims=16)
    q, k = (np.broadcast_to(rng.standard_normal(16).astype(np.float32), (1, 1, 1, 16)) for _ in "qk")
    scores = [np.sum(turned(q, [[p + 5]], rope) * turned(k, [[p]], rope)) for p in (0, 3, 100)]
    np.testing.assert_allclose(scores, scores[0], rtol=1e-4)


def test_angles_of_late_positions_are_exact_to_float32():
    cos, sin = angles(Rope(theta=10000.0, dims=8), jnp.asarray([[8191]], jnp.int32))
    turn = 8191 * 10000.0 ** (-np.arange(0, 8, 2) / 8)
    np.testing.assert_allclose(cos[0, 0], np.cos(turn), atol=1e-3)
    np.testing.assert_allclose(sin[0, 0], np.sin(turn), atol=1e-3)
