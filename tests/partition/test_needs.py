"""What a layer needs, against sizes worked out by hand."""

import pytest
from support import config

from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.partition.needs import Layer, merged, model_needs
from jaxwafer.quant.formats import FORMATS, choose


def needs(kv_cache: str = "bf16", weights: str = "native", **changes):
    fields = config(torch_dtype="bfloat16", **changes)
    return model_needs(
        "m", spec_from_config(fields), lambda _, w: choose(weights, w.role, FORMATS["bf16"]), kv_cache=kv_cache
    )


# 48 hidden; 6 heads and 3 key/value heads of 16; an MLP of 80; 101 words.
MATRICES = 48 * 96 + 2 * 48 * 48 + 96 * 48 + 3 * 48 * 80


def test_a_layer_of_llama():
    model = needs()
    layer = model.layers[0]
    assert len(model.layers) == 5 and len(set(model.layers)) == 1
    assert layer.weights == 2 * (MATRICES + 2 * 48) and layer.active == MATRICES
    assert layer.token == 2 * 2 * 48 and layer.state == 0
    assert layer.flops(1, 100) == 2 * MATRICES + 4 * 96 * 100
    assert layer.bytes(3, 100) == layer.weights + 3 * layer.token * 100
    assert (model.embedding, model.head) == (2 * 101 * 48, 2 * (101 * 48 + 48))
    assert model.weights == 2 * model.parameters


def test_formats_change_what_is_needed():
    assert needs(kv_cache="fp8").layers[0].token == 96
    # A scale of two bytes for 32 of 48 and 96 inputs, two groups and three; 80 inputs of down take three.
    packed = needs(weights="int4").layers[0]
    rows = [(96, 48), (48, 48), (48, 48), (48, 96), (80, 48), (80, 48), (48, 80)]
    assert packed.weights == sum(n * -(-k // 32) * 18 for n, k in rows) + 2 * 2 * 48
    with pytest.raises(UserError, match="unknown KV cache format 'int4'"):
        needs(kv_cache="int4")


def test_a_tied_head_is_read_but_not_kept_twice():
    model = needs(tie_word_embeddings=True)
    assert (model.embedding, model.head, model.head_read) == (2 * 101 * 48, 2 * 48, 2 * 101 * 48)


def test_expected_experts_of_a_mixture():
    layer = Layer(kind="moe", weights=1000, expert_weights=800, experts=8, chosen=2)
    assert layer.touched(1) == pytest.approx(200 + 800 / 4)
    # Both tokens miss an expert with probability (3/4)².
    assert layer.touched(2) == pytest.approx(200 + 800 * (1 - 0.75**2))
    assert layer.touched(1000) == pytest.approx(1000)


def test_a_window_bounds_what_is_kept_and_seen():
    layer = Layer(kind="w", weights=10, token=2, window=128, flops_context=4.0)
    assert (layer.request(100), layer.request(1000)) == (200, 256)
    assert layer.flops(1, 1000) == 4 * 128


def test_the_vocabulary_at_the_ends_is_counted_to_the_end_layers():
    model = needs()
    layers = merged(model, "ends")
    extra = [a.weights - b.weights for a, b in zip(layers, model.layers, strict=True)]
    assert extra == [model.embedding, 0, 0, 0, model.head]
    assert merged(model, "room") == model.layers
