"""Grouped-query attention on a core's heads."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.layers import gqa
from jaxwafer.model.kinds import GQA
from jaxwafer.model.rope import Rope
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import FORMATS

HIDDEN, KV, GROUP, DIM, T = 12, 2, 2, 4, 5
KIND = GQA(hidden=HIDDEN, heads=KV * GROUP, kv_heads=KV, head_dim=DIM, rope=Rope(theta=100.0, dims=DIM), eps=1e-5)


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 16, HIDDEN), "k": (2, 8, HIDDEN), "v": (2, 8, HIDDEN), "o": (2, HIDDEN, 16), "norm": (2, HIDDEN)}
    return {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}


def core(plain: dict, kv_heads: slice) -> dict:
    """What one core holds: some key/value heads with their queries."""
    rows, cols = (slice(kv_heads.start * n * DIM, kv_heads.stop * n * DIM) for n in (1, GROUP))
    cut = {"q": plain["q"][:, cols], "k": plain["k"][:, rows], "v": plain["v"][:, rows], "o": plain["o"][..., cols]}
    stored = {n: QuantizedArray(jnp.asarray(a), None, None, format=FORMATS["f32"]) for n, a in cut.items()}
    return stored | {"norm": jnp.asarray(plain["norm"])}


@partial(jax.jit, static_argnames="kind")
def run(shard: dict, layer: jax.Array, x: jax.Array, kind: GQA = KIND) -> jax.Array:
    """A whole prompt of T tokens through one core's heads, with an empty cache."""
    ops, heads = Operations("cpu"), shard["k"].values.shape[1] // DIM
    step = Step(
        start=jnp.zeros(1, jnp.int32),
        count=jnp.full(1, T, jnp.int32),
        table=jnp.asarray([[2, 0]], jnp.int32),
        slot=jnp.zeros(1, jnp.int32),
    )
    carry, rows = gqa.project(kind, shard, layer, x, step, {}, ops)
    block, offset = step.rows(T, 4)
    empty = Pages(values=jnp.full((2, 3, 4, heads, DIM), jnp.nan, jnp.float32), exponent=None)
    cache = {name: ops.append(empty, layer, block, offset, r) for name, r in rows.items()}
    return gqa.output(kind, shard, layer, gqa.attend(kind, shard, layer, carry, cache, step, ops), ops)


def expected(plain: dict, layer: int, x: np.ndarray, window: int = T) -> np.ndarray:
    p, x = {n: a[layer].astype(np.float64) for n, a in plain.items()}, x[0].astype(np.float64)
    h = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-5) * p["norm"]
    turn = np.arange(T)[:, None, None] * KIND.rope.frequencies().astype(np.float64)

    def rotate(y):
        low, high = np.split(y, 2, -1)
        return np.concatenate([low * np.cos(turn) - high * np.sin(turn), high * np.cos(turn) + low * np.sin(turn)], -1)

    q, k = (rotate((h @ p[n].T + p.get(f"{n}_bias", 0)).reshape(T, -1, DIM)) for n in "qk")
    v = (h @ p["v"].T + p.get("v_bias", 0)).reshape(T, -1, DIM)
    out = np.zeros((T, KV * GROUP, DIM))
    for head in range(KV * GROUP):
        for t in range(T):
            seen = slice(max(0, t + 1 - window), t + 1)
            weight = np.exp(k[seen, head // GROUP] @ q[t, head] / np.sqrt(DIM))
            sink = np.exp(p["sinks"][head]) if "sinks" in p else 0
            out[t, head] = weight / (weight.sum() + sink) @ v[seen, head // GROUP]
    return out.reshape(1, T, -1) @ p["o"].T + p.get("o_bias", 0)


@pytest.mark.parametrize("layer", [0, 1])
def test_it_is_the_textbooks_attention_and_cores_add_up(layer):
    plain, x = weights(), np.random.default_rng(1).standard_normal((1, T, HIDDEN)).astype(np.float32)
    whole = run(core(plain, slice(0, KV)), layer, x)
    np.testing.assert_allclose(whole, expected(plain, layer, x), rtol=1e-4, atol=1e-4)
    halves = sum(run(core(plain, slice(n, n + 1)), layer, x) for n in range(KV))
    np.testing.assert_allclose(halves, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [2, 4])
def test_biases_sinks_and_a_window_shorter_than_a_block(window):
    """As in gpt-oss. Each core has its heads' sinks and biases; one of them adds the output's bias."""
    plain, rng = weights(), np.random.default_rng(2)
    sizes = {"q_bias": 16, "k_bias": 8, "v_bias": 8, "sinks": KV * GROUP, "o_bias": HIDDEN}
    plain |= {n: rng.standard_normal((2, size)).astype(np.float32) for n, size in sizes.items()}
    kind = replace(KIND, bias=True, output_bias=True, sinks=True, window=window)
    x = rng.standard_normal((1, T, HIDDEN)).astype(np.float32)
    shards = []
    for n in range(KV):
        shard = core(plain, slice(n, n + 1))
        for name in sizes:
            part = plain[name] if name == "o_bias" else np.split(plain[name], KV, axis=1)[n]
            shard[name] = jnp.asarray(part)
        shards.append(shard)
    together = jax.tree.map(lambda *parts: jnp.stack(parts), *shards)
    partials = jax.vmap(lambda shard: run(shard, 1, x, kind), axis_name="core")(together)
    np.testing.assert_allclose(partials.sum(0), expected(plain, 1, x, window), rtol=1e-4, atol=1e-4)


def test_flops_of_attention_are_two_products_a_row_read():
    assert KIND.flops(10) == 2 * 2 * KV * GROUP * DIM * 10
