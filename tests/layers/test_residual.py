"""The residual stream: plain, and Kimi K3's blocks."""

import jax.numpy as jnp
import numpy as np

from jaxwafer.layers.residual import Plain, residual
from jaxwafer.model.residual import BlockResidual

HIDDEN, EVERY, LAYERS = 6, 2, 5


def test_the_plain_stream_is_a_sum():
    rule = residual(None)
    assert isinstance(rule, Plain)
    x, stream = rule.mixer_input(rule.begin(jnp.ones((1, 1, 2))), {}, 0, 0)
    assert np.asarray(rule.end(rule.add(stream, 2 * x), {})).tolist() == [[[3.0, 3.0]]]


def mix(blocks: list[np.ndarray], total: np.ndarray, norm: np.ndarray, proj: np.ndarray, eps: float) -> np.ndarray:
    rows = np.stack([*blocks, total])
    score = (rows / np.sqrt(np.mean(rows**2, -1, keepdims=True) + eps) * norm) @ proj
    weight = np.exp(score - score.max(0))
    return np.sum(weight / weight.sum(0) * rows.transpose(3, 0, 1, 2), 1).transpose(1, 2, 0)


def test_blocks_close_every_few_layers_and_are_mixed_by_a_softmax_over_them_and_the_sum():
    """Against lists of arrays, with layers that multiply what they read."""
    kind = BlockResidual(hidden=HIDDEN, every=EVERY, layers=LAYERS, eps=1e-5)
    rng = np.random.default_rng(0)
    weights = {w.name: rng.standard_normal((LAYERS, *w.shape)) for w in kind.weights()}
    ends = {w.name: rng.standard_normal(w.shape) for w in kind.globals()}
    embedded = rng.standard_normal((2, 3, HIDDEN))

    total, blocks = embedded, []
    for layer in range(LAYERS):
        w = {n: a[layer] for n, a in weights.items()}
        x = mix(blocks, total, w["self_attention_norm"], w["self_attention_proj"][0], 1e-5) if blocks else total
        if layer % EVERY == 0:
            blocks, total = [*blocks, total], np.zeros_like(total)
        total = total + 0.5 * x
        total = total - 0.3 * mix(blocks, total, w["mlp_norm"], w["mlp_proj"][0], 1e-5)
    expected = mix(blocks, total, ends["output_norm"], ends["output_proj"][0], 1e-5)

    rule = residual(kind)
    device = {n: jnp.asarray(a, jnp.float32) for n, a in (weights | ends).items()}
    stream = rule.begin(jnp.asarray(embedded, jnp.float32))
    assert stream.blocks.shape == (3, 2, 3, HIDDEN)
    for layer in range(LAYERS):
        number = jnp.int32(layer)
        x, stream = rule.mixer_input(stream, device, number, number)
        stream = rule.add(stream, 0.5 * x)
        stream = rule.add(stream, -0.3 * rule.mlp_input(stream, device, number, number))
    np.testing.assert_allclose(rule.end(stream, device), expected, rtol=1e-5, atol=1e-5)


def test_an_empty_slot_changes_no_stream():
    rule = residual(BlockResidual(hidden=2, every=1, layers=3, eps=1e-5))
    weights = {w.name: jnp.ones((1, *w.shape)) for w in rule.kind.weights()}
    stream = rule.begin(jnp.ones((1, 1, 2)))
    _, after = rule.mixer_input(stream, weights, jnp.int32(0), jnp.int32(-1))
    np.testing.assert_array_equal(after.total, stream.total)
    np.testing.assert_array_equal(after.blocks, stream.blocks)
