"""Kimi Delta Attention on a core's heads, against its recurrence in float64."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from mixer_shards import Core, random_weights

from jaxwafer.model.kinds import KDA
from jaxwafer.ops.bits import from_bits, to_bits
from jaxwafer.ops.state import State

KIND = KDA(
    hidden=12, heads=3, key_dim=4, value_dim=6, taps=4, eps=1e-5, decay_rank=5, gate_rank=2
)  # fmt: skip
# Kimi K3: bounded decay, a full matrix for the gate, more stored rates than heads.
K3 = dataclasses.replace(KIND, lower_bound=-5.0, gate_rank=None)
KINDS = {"Kimi Linear": KIND, "Kimi K3": K3}


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected(kind: KDA, weights: dict, layer: int, x: np.ndarray) -> np.ndarray:
    """One request [T, hidden] from its first token, by the published formulas."""
    w, x = {n: a[layer].astype(np.float64) for n, a in weights.items()}, x.astype(np.float64)
    length, heads = len(x), kind.heads
    h = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + kind.eps) * w["norm"]

    def convolved(name, dim):
        inputs = np.concatenate([np.zeros((kind.taps - 1, heads * dim)), h @ w[name].T])
        y = sum(inputs[j : j + length] * w[f"{name}_conv"][:, 0, j] for j in range(kind.taps))
        return (y * sigmoid(y)).reshape(length, heads, dim)

    q, k, v = convolved("q", kind.key_dim), convolved("k", kind.key_dim), convolved("v", kind.value_dim)
    q, k = (a / np.sqrt(np.sum(a**2, -1, keepdims=True) + 1e-6) for a in (q, k))
    q = q / np.sqrt(kind.key_dim)
    z = (h @ w["f_a"].T @ w["f_b"].T + w["dt_bias"]).reshape(length, heads, kind.key_dim)
    rate = np.exp(w["a_log"].reshape(heads, 1))
    g = -rate * np.log1p(np.exp(z)) if kind.lower_bound is None else kind.lower_bound * sigmoid(rate * z)
    beta = sigmoid(h @ w["b"].T)
    gate = sigmoid((h if kind.gate_rank is None else h @ w["g_a"].T) @ w["g"].T).reshape(length, heads, -1)
    state, out = np.zeros((heads, kind.key_dim, kind.value_dim)), []
    for t in range(length):
        state = np.exp(g[t])[..., None] * state
        update = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * update[:, None]
        out.append(np.einsum("hkv,hk->hv", state, q[t]))
    out = np.stack(out)
    out = out / np.sqrt(np.mean(out**2, -1, keepdims=True) + kind.eps) * w["o_norm"] * gate
    return out.reshape(length, -1) @ w["o"].T


def prompt(length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((length, KIND.hidden)).astype(np.float32)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("layer", [0, 1])
def test_it_is_the_recurrence(name, layer):
    kind, x = KINDS[name], prompt(20)
    weights = random_weights(kind)
    found = Core(kind, weights).run(layer, x[None], [0], [20], [2])
    close(found[0], expected(kind, weights, layer, x))


@pytest.mark.parametrize("cores", [2, 3, 4])
def test_cores_add_up_whatever_heads_they_have(cores):
    weights, x = random_weights(KIND), prompt(9)
    parts = [Core(KIND, weights, cores=cores, core=c).run(1, x[None], [0], [9], [0]) for c in range(cores)]
    close(sum(parts)[0], expected(KIND, weights, 1, x))


@pytest.mark.parametrize("chunks", [[1] * 12, [7, 5], [2, 1, 9], [1, 11]])
def test_any_split_of_the_prompt_is_the_whole(chunks):
    """Every chunk is padded to 12 tokens of noise, as the engine's chunks are padded to a fixed length."""
    weights, x = random_weights(KIND), prompt(12)
    core, found, start = Core(KIND, weights), [], 0
    for count in chunks:
        padded = prompt(12, seed=9)[None]
        padded[0, :count] = x[start : start + count]
        found.append(core.run(0, padded, [start], [count], [3])[0, :count])
        start += count
    close(np.concatenate(found), expected(KIND, weights, 0, x))


def test_steps_of_one_token_are_the_chunk():
    weights, x = random_weights(KIND), prompt(12)
    core = Core(KIND, weights)
    found = [core.run(0, x[None, t : t + 1], [t], [1], [0])[0] for t in range(12)]
    close(np.concatenate(found), expected(KIND, weights, 0, x))


def test_pad_rows_and_pad_tokens_change_nothing():
    """Requests of 5 and 1 tokens in slots 1 and 3, and a pad row that names slot 1 (pitfalls 1 and 3)."""
    weights, x = random_weights(KIND), np.stack([prompt(5), prompt(5, seed=2), prompt(5, seed=3)])
    core = Core(KIND, weights)
    before = {name: np.asarray(state.values) for name, state in core.cache.items()}
    found = core.run(1, x, [0, 0, 0], [5, 0, 1], [1, 1, 3])
    close(found[0], expected(KIND, weights, 1, x[0]))
    close(found[2, :1], expected(KIND, weights, 1, x[2, :1]))
    # Each alone leaves the same state, and no other slot or layer is written.
    for slot, row, count in ((1, 0, 5), (3, 2, 1)):
        alone = Core(KIND, weights)
        alone.run(1, x[row : row + 1, :count], [0], [count], [slot])
        for name, state in core.cache.items():
            close(state.values[1, slot], alone.cache[name].values[1, slot])
    for name, state in core.cache.items():
        np.testing.assert_array_equal(state.values[0], before[name][0])
        np.testing.assert_array_equal(state.values[1, [0, 2]], before[name][1, [0, 2]])


def test_the_state_of_a_request_is_what_the_declaration_says():
    sizes = {field.name: tuple(axis.size for axis in field.axes) for field in KIND.cache()}
    assert sizes == {"state": (3, 4, 6), "q_past": (3, 12), "k_past": (3, 12), "v_past": (3, 18)}


def test_the_first_of_the_stored_rates_are_used():
    (a_log,) = (w for w in K3.weights() if w.name == "a_log")
    assert a_log.shape == a_log.hub_shape == (1, 1, 3, 1)
    assert [axis.padded for axis in a_log.axes] == [False, False, True, False]


@pytest.mark.parametrize("chunks", [[1] * 12, [7, 5]])
def test_past_inputs_in_bfloat16_are_those_that_a_chunk_of_the_whole_prompt_reads(chunks):
    weights, x = random_weights(KIND), prompt(12)

    def fresh() -> Core:
        core = Core(KIND, weights)
        for field in KIND.cache():
            if field.inputs:
                core.cache[field.name] = State(values=to_bits(core.cache[field.name].values, jnp.uint16))
        return core

    whole, core, found, start = fresh(), fresh(), [], 0
    wanted = whole.run(0, x[None], [0], [12], [3])[0]
    for count in chunks:
        found.append(core.run(0, x[None, start : start + count], [start], [count], [3])[0])
        start += count
    close(np.concatenate(found), wanted)
    for name, state in core.cache.items():
        close(from_bits(state.values).astype(jnp.float32)[0, 3], from_bits(whole.cache[name].values)[0, 3])
    # Eight bits of each input, of outputs around 1.
    exact = Core(KIND, weights).run(0, x[None], [0], [12], [3])[0]
    np.testing.assert_allclose(wanted, exact, atol=0.05)
