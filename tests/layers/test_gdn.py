"""Gated DeltaNet on a core's heads, against its recurrence in float64."""

import dataclasses

import numpy as np
import pytest
from mixer_shards import Core, random_weights

from jaxwafer.model.kinds import GatedDeltaNet

# Three key heads, each shared by two value heads.
KIND = GatedDeltaNet(
    hidden=12, key_heads=3, value_heads=6, key_dim=4, value_dim=5, taps=4, eps=1e-6, fused=True, norm_shift=1.0
)  # fmt: skip


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def expected(weights: dict, layer: int, x: np.ndarray) -> np.ndarray:
    """One request [T, hidden] from its first token, by the published formulas."""
    w, x = {n: a[layer].astype(np.float64) for n, a in weights.items()}, x.astype(np.float64)
    length, heads, group = len(x), KIND.value_heads, KIND.value_heads // KIND.key_heads
    h = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + KIND.eps) * w["norm"]

    def convolved(name, dim):
        inputs = h @ w[name].T
        inputs = np.concatenate([np.zeros((KIND.taps - 1, inputs.shape[1])), inputs])
        y = sum(inputs[j : j + length] * w[f"{name}_conv"][:, 0, j] for j in range(KIND.taps))
        return (y * sigmoid(y)).reshape(length, -1, dim)

    q, k, v = convolved("q", KIND.key_dim), convolved("k", KIND.key_dim), convolved("v", KIND.value_dim)
    q, k = (np.repeat(a / np.sqrt(np.sum(a**2, -1, keepdims=True) + 1e-6), group, 1) for a in (q, k))
    q = q / np.sqrt(KIND.key_dim)
    g = -np.exp(w["a_log"]) * np.log1p(np.exp(h @ w["a"].T + w["dt_bias"]))
    beta, z = sigmoid(h @ w["b"].T), (h @ w["z"].T).reshape(length, heads, -1)
    state, out = np.zeros((heads, KIND.key_dim, KIND.value_dim)), []
    for t in range(length):
        state = np.exp(g[t])[:, None, None] * state
        update = beta[t][:, None] * (v[t] - np.einsum("hkv,hk->hv", state, k[t]))
        state = state + k[t][..., None] * update[:, None]
        out.append(np.einsum("hkv,hk->hv", state, q[t]))
    out = np.stack(out)
    out = out / np.sqrt(np.mean(out**2, -1, keepdims=True) + KIND.eps) * w["o_norm"] * z * sigmoid(z)
    return out.reshape(length, -1) @ w["o"].T


def prompt(length: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((length, KIND.hidden)).astype(np.float32)


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("layer", [0, 1])
def test_it_is_the_recurrence(layer):
    weights, x = random_weights(KIND), prompt(20)
    close(Core(KIND, weights).run(layer, x[None], [0], [20], [2])[0], expected(weights, layer, x))


@pytest.mark.parametrize("cores", [2, 3, 4, 6, 7])
def test_cores_add_up_whatever_heads_they_have(cores):
    """With 4 cores one has no head; with 6 each key head is on two cores, which share its value heads."""
    weights, x = random_weights(KIND), prompt(9)
    parts = [Core(KIND, weights, cores=cores, core=c).run(1, x[None], [0], [9], [0]) for c in range(cores)]
    close(sum(parts)[0], expected(weights, 1, x))


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
    close(np.concatenate(found), expected(weights, 0, x))


def test_steps_of_one_token_are_the_chunk():
    weights, x = random_weights(KIND), prompt(12)
    core = Core(KIND, weights)
    found = [core.run(0, x[None, t : t + 1], [t], [1], [0])[0] for t in range(12)]
    close(np.concatenate(found), expected(weights, 0, x))


def test_the_state_has_the_keys_before_the_values():
    """One layout for prefill and decoding (pitfall 4); it would not show where the two are equal."""
    sizes = {field.name: tuple(axis.size for axis in field.axes) for field in KIND.cache()}
    assert sizes == {"state": (6, 4, 5), "q_past": (3, 12), "k_past": (3, 12), "v_past": (3, 30)}


@pytest.mark.parametrize("fused", [True, False])
def test_every_row_of_the_hubs_tensors_is_used_once(fused):
    kind, rows = dataclasses.replace(KIND, fused=fused), {}
    for weight in kind.weights():
        rows.setdefault((weight.hub, weight.hub_shape[0]), []).extend(weight.axes[0].hub_index().tolist())
    for (hub, size), found in rows.items():
        assert sorted(found) == list(range(size)), hub
