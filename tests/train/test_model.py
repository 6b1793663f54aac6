"""The modules to train against the operations that decode, and their own gradients."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.model.mlp import MoE, Router
from jaxwafer.ops.delta_rule import reference
from jaxwafer.train import model


def random(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.array(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


@pytest.mark.parametrize("tokens", [5, 48])
def test_the_delta_rule_is_the_recurrence(tokens):
    """Two sequences, 3 heads, K of 6 and V of 5; decays up to e^-3 a token."""
    q, k = (model.unit(random(2, 3, tokens, 6, seed=s)) for s in (0, 1))
    v, beta = random(2, 3, tokens, 5, seed=2), jax.nn.sigmoid(random(2, 3, tokens, 1, seed=3))
    g = -3 * jax.nn.sigmoid(2 * random(2, 3, tokens, 6, seed=4))
    out, state = [], jnp.zeros((2, 3, 6, 5))
    for t in range(tokens):
        step, state = reference.step(q[:, :, t], k[:, :, t], v[:, :, t], g[:, :, t], beta[:, :, t, 0], state)
        out.append(step)
    np.testing.assert_allclose(model.delta_rule(q, k, v, g, beta), jnp.stack(out, axis=2), atol=2e-6)


def test_the_gradient_of_the_inverse():
    lower = 0.3 * random(2, model.CHUNK, model.CHUNK) * (jnp.tri(model.CHUNK) - jnp.eye(model.CHUNK))
    weight = random(2, model.CHUNK, model.CHUNK, seed=1)
    np.testing.assert_allclose(
        jax.grad(lambda x: jnp.sum(weight * model.invert(x)))(lower),
        jax.grad(lambda x: jnp.sum(weight * jnp.linalg.inv(jnp.eye(model.CHUNK) + x)))(lower),
        rtol=1e-3, atol=1e-3,
    )  # fmt: skip


def mixture() -> tuple[MoE, dict]:
    router = Router(score="sigmoid", chosen=2, scale=1.5, bias=True)
    kind = MoE(hidden=8, experts=5, intermediate=6, router=router, eps=1e-5, shared=4)
    weights = {w.name: random(*w.shape, seed=n) for n, w in enumerate(kind.weights())}
    return kind, weights | {"router_bias": 0.3 * weights["router_bias"]}


def expert_by_expert(kind: MoE, w: dict, x: jax.Array) -> jax.Array:
    """Every expert of every token, weighted by nothing where it is not chosen."""
    scores = jax.nn.sigmoid(x @ w["router"].T)
    _, chosen = jax.lax.top_k(scores + w["router_bias"], 2)
    kept = jnp.sum(jax.nn.one_hot(chosen, kind.experts), axis=1) * scores
    shares = kind.router.scale * kept / jnp.sum(kept, axis=1, keepdims=True)
    each = jnp.stack([model.dense(x, w["gate"][e], w["up"][e], w["down"][e]) for e in range(kind.experts)], axis=1)
    mixed = jnp.sum(shares[..., None] * each, axis=1)
    return mixed + model.dense(x, w["shared_gate_proj"], w["shared_up_proj"], w["shared_down_proj"])


def test_experts_by_capacity_are_the_experts_and_so_are_their_gradients():
    kind, weights = mixture()
    x, real = random(7, 8, seed=9), jnp.ones(7, bool)
    out, load, _ = model.mixture(kind, weights, x, real, None)
    np.testing.assert_allclose(out, expert_by_expert(kind, weights, x), atol=2e-5)
    assert float(load.sum()) == 14
    ours = jax.grad(lambda w, x: jnp.sum(jnp.sin(model.mixture(kind, w, x, real, None)[0])), argnums=(0, 1))
    theirs = jax.grad(lambda w, x: jnp.sum(jnp.sin(expert_by_expert(kind, w, x))), argnums=(0, 1))
    close = partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-4)  # they reach 60
    jax.tree.map(close, ours(weights, x), theirs(weights, x))


def test_padding_takes_no_room_and_rows_beyond_it_are_dropped():
    kind, weights = mixture()
    x, real = random(10, 8, seed=9), jnp.arange(10) < 7
    out, load, _ = model.mixture(kind, weights, x, real, None)
    np.testing.assert_allclose(out[:7], expert_by_expert(kind, weights, x[:7]), atol=2e-5)
    assert float(load.sum()) == 14
    # Room for one row an expert: the first token's experts are its own whatever follows.
    out, _, _ = model.mixture(kind, weights, x, real, 1.0 / 4)
    np.testing.assert_allclose(out[0], expert_by_expert(kind, weights, x)[0], atol=2e-5)
    assert np.abs(out - expert_by_expert(kind, weights, x))[1:7].max() > 0.01
