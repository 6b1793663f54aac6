"""The gated delta rule against its recurrence in float64."""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.delta_rule.api import BACKENDS, recur
from jaxwafer.ops.state import State

USED = {"backend": "reference"}


@pytest.fixture(params=BACKENDS, autouse=True, scope="module")
def backend(request):
    """Every test, with each backend; the TPU's is interpreted."""
    USED["backend"] = request.param
    with pltpu.force_tpu_interpret_mode() if request.param == "tpu" else nullcontext():
        yield


@partial(jax.jit, static_argnames="backend")
def recurred(*inputs, backend):
    *tokens, stored, slot, start = inputs
    out, state = recur(*tokens, State(values=stored), jnp.int32(1), slot, start, backend=backend)
    return out, state.values


def run(*inputs):
    """From and to states [B, H, K, V], kept in rows of a cache in another order."""
    *tokens, state = inputs
    batch = len(state)
    slot = np.arange(batch, dtype=np.int32)[::-1]
    stored = np.full((2, batch, *state.shape[1:]), 7.0, np.float32)
    stored[1, slot] = state
    out, after = recurred(*tokens, stored, slot.copy(), np.ones(batch, np.int32), backend=USED["backend"])
    assert (np.asarray(after)[0] == 7.0).all()
    return out, after[1, slot]


def oracle(q, k, v, g, beta, state):
    """The textbook, token by token, in float64."""
    q, k, v, g, beta, state = (np.asarray(x, np.float64) for x in (q, k, v, g, beta, state))
    outputs = []
    for t in range(q.shape[1]):
        state = np.exp(g[:, t])[..., None] * state
        seen = np.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + np.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t][..., None] * (v[:, t] - seen))
        outputs.append(np.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return np.stack(outputs, 1), state


def inputs(seed, tokens, keys=5, values=7, *, batch=2, heads=3, channels=True, strength=1.0):
    """Unit keys and queries, β from 0 to 1, decays around −strength."""
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((2, batch, tokens, heads, keys))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.standard_normal((batch, tokens, heads, values))
    g = -strength * rng.gamma(0.5, size=(batch, tokens, heads, keys if channels else 1))
    beta = rng.uniform(size=(batch, tokens, heads))
    state = rng.standard_normal((batch, heads, keys, values))
    return tuple(x.astype(np.float32) for x in (q, k, v, g, beta, state))


def close(found, expected, tolerance=2e-5):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(np.asarray(one), other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 64, 65, 150])
@pytest.mark.parametrize("channels", [True, False], ids=["a channel", "a head"])
def test_it_is_the_recurrence(tokens, channels):
    given_inputs = inputs(tokens, tokens, channels=channels)
    out, state = run(*given_inputs)
    assert out.shape == (2, tokens, 3, 7) and out.dtype == jnp.float32
    assert state.shape == (2, 3, 5, 7) and state.dtype == jnp.float32
    close((out, state), oracle(*given_inputs))


@pytest.mark.parametrize("keys, values", [(4, 9), (9, 4), (8, 8), (1, 3)])
def test_keys_and_values_may_differ_in_size(keys, values):
    given_inputs = inputs(3, 20, keys, values)
    close(run(*given_inputs), oracle(*given_inputs))


@pytest.mark.parametrize("strength", [0.0, 1e-3, 10.0, 300.0, 1e5])
@pytest.mark.parametrize("tokens", [1, 40, 100])
def test_decays_of_any_strength_are_exact(strength, tokens):
    given_inputs = inputs(5, tokens, strength=strength)
    close(run(*given_inputs), oracle(*given_inputs))


def test_a_weak_decay_after_a_strong_one_keeps_its_digits():
    """A difference of cumulative sums would have lost them: at 1e6 a float32 has steps of 0.06."""
    q, k, v, g, beta, state = inputs(6, 48, strength=0.05)
    g[:, 3], g[:, 20] = -1e6, -1e6
    close(run(q, k, v, g, beta, state), oracle(q, k, v, g, beta, state))


def test_equal_keys_without_decay_only_replace():
    """β = 1 and one key: each token overwrites the value, which the triangular system must reproduce."""
    q, k, v, g, beta, state = inputs(7, 64)
    k[:], q[:], g[:], beta[:] = k[:, :1], k[:, :1], 0, 1
    out, _ = run(q, k, v, g, beta, state)
    np.testing.assert_allclose(out, v, atol=2e-5)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([1, 2, 7, 16, 33, 64]), min_size=1, max_size=4),
    st.booleans(), st.sampled_from([0.1, 2.0, 50.0]), st.integers(0, 2**31),
)  # fmt: skip
def test_any_split_into_calls_gives_the_same(lengths, channels, strength, seed):
    *tokens, state = inputs(seed, sum(lengths), channels=channels, strength=strength)
    expected = oracle(*tokens, state)
    outputs, start = [], 0
    for length in lengths:
        out, state = run(*(x[:, start : start + length] for x in tokens), state)
        outputs.append(np.asarray(out))
        start += length
    close((np.concatenate(outputs, 1), state), expected)


@pytest.mark.parametrize("tokens", [1, 7, 64, 100])
def test_pads_leave_the_state_exactly_unchanged(tokens):
    q, k, v, g, beta, state = inputs(8, tokens)
    _, after = run(q, k, v, 0 * g, 0 * beta, state)
    np.testing.assert_array_equal(after, state)


@pytest.mark.parametrize("real, padded", [(1, 2), (1, 16), (5, 16), (16, 40), (20, 64), (70, 128)])
def test_pads_after_real_tokens_change_nothing(real, padded):
    """A step padded to the chunk length is a step (pitfall 3)."""
    q, k, v, g, beta, state = inputs(9, padded)
    g[:, real:], beta[:, real:] = 0, 0
    out, after = run(q, k, v, g, beta, state)
    expected = oracle(q[:, :real], k[:, :real], v[:, :real], g[:, :real], beta[:, :real], state)
    close((out[:, :real], after), expected)


def test_requests_and_heads_do_not_mix():
    given_inputs = inputs(10, 30)
    out, state = run(*given_inputs)
    *tokens, first = given_inputs
    alone_out, alone = run(*(x[1:, :, 2:] for x in tokens), first[1:, 2:])
    close((alone_out, alone), (out[1:, :, 2:], state[1:, 2:]), 1e-6)


@pytest.mark.parametrize("keys, values", [(5, 7), (32, 40)])
def test_a_first_token_finds_no_state_and_a_negative_slot_is_left_alone(keys, values):
    q, k, v, g, beta, state = inputs(11, 1, keys, values, batch=3)
    stored = np.stack([state, np.full_like(state, np.nan)])
    stored[1, 2] = 5.0
    slot, start = np.array([1, -1, 2], np.int32), np.array([0, 0, 3], np.int32)
    out, after = recurred(q, k, v, g, beta, stored, slot, start, backend=USED["backend"])
    before = np.stack([0 * state[0], 0 * state[0], np.full_like(state[0], 5.0)])
    want, states = oracle(q, k, v, g, beta, before)
    close((out[0], out[2]), (want[0], want[2]))
    close((after[1, 1], after[1, 2]), (states[0], states[2]))
    np.testing.assert_array_equal(after[0], state)
    assert np.isnan(np.asarray(after)[1, 0]).all()


@pytest.mark.parametrize("slots", [[-1, -1, 2, -1, 0], [3, -1, -1, 1, -1], [-1, -1]])
@pytest.mark.parametrize("heads", [3, 16])
@pytest.mark.parametrize("channels", [True, False], ids=["a channel", "a head"])
def test_idle_requests_before_between_and_after_live_ones_change_nothing(slots, heads, channels):
    q, k, v, g, beta, _ = inputs(13, 1, batch=len(slots), heads=heads, channels=channels)
    stored = np.random.default_rng(14).standard_normal((2, 5, heads, 5, 7)).astype(np.float32)
    slot, start = np.array(slots, np.int32), np.arange(1, len(slots) + 1, dtype=np.int32)
    out, after = recurred(q, k, v, g, beta, stored, slot, start, backend=USED["backend"])
    live = slot >= 0
    want, states = oracle(*(x[live] for x in (q, k, v, g, beta)), stored[1, slot[live]])
    expected = stored.copy()
    expected[1, slot[live]] = states
    close((np.asarray(out)[live], after), (want, expected))
