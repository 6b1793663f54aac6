"""A folder that the exporter wrote, as the loader reads it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.checkpoint.hub import HubCheckpoint
from jaxwafer.model import spec_from_config
from jaxwafer.quant.convert import dequantize
from jaxwafer.train import tasks
from jaxwafer.train.export import export, hub_tensors
from jaxwafer.train.loop import CONFIG
from jaxwafer.train.model import KimiLinear
from jaxwafer.train.quantize import WIDE, quantized, rounded

# Of every kind of layer one.
SMALL = CONFIG | {
    "num_hidden_layers": 3,
    "num_experts": 3,
    "linear_attn_config": CONFIG["linear_attn_config"] | {"full_attn_layers": [3], "kda_layers": [1, 2]},
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Random parameters of the shapes that the modules declare, and the folder made of them."""
    spec, rng = spec_from_config(dict(SMALL)), np.random.default_rng(0)
    shapes = jax.eval_shape(KimiLinear(spec).init, jax.random.key(0), jnp.zeros((1, 16), jnp.int32))["params"]
    params = jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), shapes)
    folder = tmp_path_factory.mktemp("export") / "made"
    export(params, SMALL, folder)
    return params, HubCheckpoint(folder)


def test_every_declared_tensor_is_there_and_no_other(written):
    _, checkpoint = written
    spec = spec_from_config(checkpoint.config)
    declared = {w.hub: w.hub_shape for w in spec.globals()}
    for number, layer in enumerate(spec.layers):
        for weight in (w for part in (layer.mixer, layer.mlp) for w in part.weights()):
            for expert in range(weight.shape[0] if weight.per_expert else 1):
                declared[f"model.layers.{number}.{weight.hub.format(expert=expert)}"] = weight.hub_shape
    assert {name: checkpoint.shape(name) for name in checkpoint.names()} == declared


def test_values_are_those_that_training_rounded_to(written):
    params, checkpoint = written
    expected = dict(hub_tensors(rounded(params, jnp.float32(1))))
    for name, array in expected.items():
        found = checkpoint.read(name)
        assert found.format.name == ("int4-g32-bf16" if quantized(name) else "f32" if name.endswith(WIDE) else "bf16")
        np.testing.assert_allclose(dequantize(found).reshape(array.shape), array, atol=1e-6, rtol=1e-6)


def test_the_tokenizer_splits_at_spaces(written):
    tokenizer = written[1].tokenizer()
    assert tokenizer.eos_ids == (tasks.EOS,) and tokenizer.vocab_size == len(tasks.VOCABULARY)
    words = " ".join(tasks.VOCABULARY[len(tasks.SPECIAL) :])
    ids = tokenizer.encode(words)
    assert ids == list(range(len(tasks.SPECIAL), len(tasks.VOCABULARY))) and tokenizer.decode(ids) == words
    assert tokenizer.encode("copy Z <eos>") == [tasks.ID["copy"], tasks.UNKNOWN, tasks.EOS]
