"""Mixtures of experts, on one core and on several, against one written in NumPy."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxwafer.layers import mlps
from jaxwafer.layers.moe import route
from jaxwafer.model.declare import Weight
from jaxwafer.model.kinds import MoE
from jaxwafer.model.mlp import Activation, Router
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.step import Step
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import FORMATS

B, T, HIDDEN, LAYERS, LAYER = 3, 4, 12, 2, 1
# Of the T tokens of each request; one request is padding.
COUNT = np.array([4, 1, 0], np.int32)
SOFTMAX = Router(score="softmax", chosen=3)
SIGMOID = Router(score="sigmoid", chosen=3, bias=True, scale=2.5)
KINDS = {
    "qwen3": MoE(hidden=HIDDEN, experts=6, intermediate=10, router=SOFTMAX, eps=1e-5),
    "softmax, not renormalized": MoE(
        hidden=HIDDEN, experts=6, intermediate=10, router=replace(SOFTMAX, renormalize=False), eps=1e-5
    ),
    "shared gate": MoE(
        hidden=HIDDEN, experts=6, intermediate=10, router=SOFTMAX, eps=1e-5, shared=40, shared_gate=True
    ),
    "glm": MoE(hidden=HIDDEN, experts=5, intermediate=10, router=SIGMOID, eps=1e-5, shared=40),
    "groups": MoE(
        hidden=HIDDEN, experts=8, intermediate=10, router=replace(SIGMOID, groups=4, kept_groups=2), eps=1e-5
    ),
    "gpt-oss": MoE(
        hidden=HIDDEN, experts=6, intermediate=10, eps=1e-5, expert_bias=True, fused=True,
        router=Router(score="softmax-chosen", chosen=2, logit_bias=True), router_name="router",
        activation=Activation(name="swiglu-oai", limits=(0.5,)),
    ),
    "latent": MoE(
        hidden=HIDDEN, experts=7, intermediate=10, router=SIGMOID, eps=1e-5, shared=40, latent=36,
        activation=Activation(name="situ", limits=(4.0, 25.0)),
    ),
}  # fmt: skip


def plain(kind: MoE) -> dict[str, np.ndarray]:
    """Random weights [LAYERS, …] of the declared shapes."""
    rng = np.random.default_rng(0)

    def values(w: Weight) -> np.ndarray:
        return rng.standard_normal((LAYERS, *w.shape)).astype(np.float32) * (0.3 if w.name.endswith("bias") else 1.0)

    return {w.name: values(w) for w in kind.weights()}


def stored(kind: MoE, weights: dict[str, np.ndarray], cores: int) -> tuple[dict, dict]:
    """The weights padded as the mesh wants them, and their PartitionSpecs."""
    arrays, specs = {}, {}
    for w in kind.weights():
        array = weights[w.name]
        for number, axis in enumerate(w.axes, 1):
            index = axis.placed(axis.shards(1, cores))
            array = np.take(array, np.maximum(index, 0), axis=number)
            array[(slice(None),) * number + (index < 0,)] = 0
        leaves = jnp.asarray(array), PartitionSpec(None, *(a.mesh_axes or None for a in w.axes))
        if w.matrix:
            leaves = (QuantizedArray(leaf, None, None, format=FORMATS["f32"]) for leaf in leaves)
        arrays[w.name], specs[w.name] = leaves
    return arrays, specs


def run(kind: MoE, weights: dict, x: np.ndarray, cores: int) -> tuple[np.ndarray, np.ndarray]:
    """The sum over cores of the last phase, and the experts that each core read."""
    arrays, specs = stored(kind, weights, cores)
    mesh = Mesh(np.array(jax.devices()[:cores]), ("core",))
    start = jnp.zeros(B, jnp.int32)
    step = Step(start=start, count=jnp.asarray(COUNT), table=start[:, None], slot=start)

    def body(arrays, x):
        carry = x
        for number, phase in enumerate(mlps.phases(kind)):
            if number % 2:
                carry = phase(kind, carry)
            else:
                carry = phase(kind, arrays, jnp.int32(LAYER), carry, step, Operations("none"))
        partial_sum, touched = carry
        return jax.lax.psum(partial_sum, "core"), touched[None]

    mapped = jax.shard_map(body, mesh=mesh, in_specs=(specs, PartitionSpec()),
                           out_specs=(PartitionSpec(), PartitionSpec("core")), check_vma=False)  # fmt: skip
    out, touched = jax.jit(mapped)(arrays, jnp.asarray(x))
    return np.asarray(out), np.asarray(touched)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def softmax(x):
    e = np.exp(x - x.max())
    return e / e.sum()


def routing(router: Router, logits: np.ndarray, bias: np.ndarray | None) -> dict[int, float]:
    """Weight of each chosen expert of one token."""
    if router.logit_bias:
        logits = logits + bias
    if router.score == "softmax-chosen":
        chosen = np.argsort(-logits)[: router.chosen]
        return dict(zip(chosen.tolist(), router.scale * softmax(logits[chosen]), strict=True))
    scores = softmax(logits) if router.score == "softmax" else sigmoid(logits)
    ranked = scores + bias if router.bias else scores.copy()
    if router.groups > 1:
        groups = np.split(np.arange(len(ranked)), router.groups)
        order = sorted(groups, key=lambda g: -np.sort(ranked[g])[-2:].sum())
        for group in order[router.kept_groups :]:
            ranked[group] = -np.inf
    chosen = np.argsort(-ranked)[: router.chosen]
    total = scores[chosen].sum() if router.renormalize else 1.0
    return dict(zip(chosen.tolist(), router.scale * scores[chosen] / total, strict=True))


def joined(activation: Activation, gate, up):
    if activation.name == "situ":
        a, b = activation.limits
        return a * np.tanh(gate / a) * sigmoid(gate) * b * np.tanh(up / b)
    if activation.name == "swiglu-oai":
        (limit,) = activation.limits
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate * sigmoid(1.702 * gate) * (up + 1)
    return gate * sigmoid(gate) * up


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x) + eps) * weight


def expected(kind: MoE, weights: dict, x: np.ndarray) -> tuple[np.ndarray, set[int]]:
    """The mixture of x [hidden], one token, and its experts."""
    w = {name: array[LAYER].astype(np.float64) for name, array in weights.items()}
    h = rms_norm(x.astype(np.float64), w["norm"], kind.eps)
    shares = routing(kind.router, w["router"] @ h, w.get("router_bias"))
    inner = w["latent_down"] @ h if kind.latent else h
    mixed = np.zeros_like(inner)
    for e, share in shares.items():
        gate, up = (w[n][e] @ inner + w.get(f"{n}_bias", np.zeros((kind.experts, 1)))[e] for n in ("gate", "up"))
        down = w["down"][e] @ joined(kind.activation, gate, up)
        mixed += share * (down + w["down_bias"][e] if kind.expert_bias else down)
    if kind.latent:
        mixed = w["latent_up"] @ rms_norm(mixed, w["latent_norm"], kind.eps)
    if kind.shared:
        gate, up = (w[f"shared_{n}_proj"] @ h for n in ("gate", "up"))
        shared = w["shared_down_proj"] @ joined(kind.activation, gate, up)
        mixed += shared * sigmoid(w["shared_gate"] @ h) if kind.shared_gate else shared
    return mixed, set(shares)


@pytest.mark.parametrize("cores", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_a_mixture_is_that_of_numpy_and_reads_only_what_real_tokens_chose(name, cores):
    kind = KINDS[name]
    weights, x = plain(kind), np.random.default_rng(1).standard_normal((B, T, HIDDEN)).astype(np.float32)
    out, touched = run(kind, weights, x, cores)
    used: set[int] = set()
    for request, token in np.ndindex(B, T):
        if token < COUNT[request]:
            want, chosen = expected(kind, weights, x[request, token])
            np.testing.assert_allclose(out[request, token], want, rtol=1e-4, atol=1e-4)
            used |= chosen
    each = -(-kind.experts // cores)
    assert touched.tolist() == [sum(e // each == core for e in used) for core in range(cores)]


def test_pad_tokens_touch_no_expert():
    kind = KINDS["qwen3"]
    weights, x = plain(kind), np.random.default_rng(1).standard_normal((B, T, HIDDEN)).astype(np.float32)
    for name in ("gate", "up", "down"):
        weights[name][:] = np.nan
    out, _ = run(kind, weights, x, 2)
    real = np.arange(T) < COUNT[:, None]
    assert np.isnan(out[real]).all() and not out[~real].any()


def test_the_correction_bias_moves_the_choice_and_not_the_weights():
    router = Router(score="sigmoid", chosen=1, bias=True, renormalize=False)
    logits, bias = np.array([[[1.0, 0.0]]], np.float32), np.array([0.0, 1.0], np.float32)
    chosen, shares = jax.jit(partial(route, router))(logits, bias)
    assert (chosen.item(), shares.item()) == (1, 0.5)


def test_groups_are_ranked_by_their_two_best_experts():
    """Group 0 has the best expert, group 1 the best two."""
    router = Router(score="sigmoid", chosen=2, bias=True, groups=2, kept_groups=1)
    logits = np.array([[[3.0, -5.0, -5.0, 2.0, 1.0, 0.0]]], np.float32)
    chosen, _ = jax.jit(partial(route, router))(logits, np.zeros(6, np.float32))
    assert chosen.tolist() == [[[3, 4]]]


def test_a_plain_mixture_has_one_phase_and_a_latent_one_collectives_between():
    assert len(mlps.phases(KINDS["glm"])) == 1
    assert len(mlps.phases(KINDS["latent"])) == 5
