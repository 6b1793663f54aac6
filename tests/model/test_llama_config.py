"""From config.json to a ModelSpec, or to a refusal."""

import json
from pathlib import Path

import pytest
from support import config

from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.model.kinds import GQA, DenseMLP

CARDS = Path(__file__).parents[2] / "checkpoints"


def card(name: str) -> dict:
    return json.loads((CARDS / f"{name}.json").read_text())


# Parameters of the published checkpoints.
@pytest.mark.parametrize(
    "name, parameters, heads, kv_heads, tied",
    [
        ("smollm2-135m", 134_515_008, 9, 3, True),
        ("llama-3.1-8b", 8_030_261_248, 32, 8, False),
        ("llama-3.1-70b", 70_553_706_496, 64, 8, False),
        ("llama-3.1-405b", 405_853_388_800, 128, 8, False),
    ],
)
def test_published_models_have_their_published_parameters(name, parameters, heads, kv_heads, tied):
    spec = spec_from_config(card(name))
    assert spec.parameters == parameters
    (mixer,), (mlp,) = spec.mixers, spec.mlps
    assert (mixer.heads, mixer.kv_heads, spec.tied, type(mlp)) == (heads, kv_heads, tied, DenseMLP)


def test_layers_of_equal_kinds_are_one_kind():
    spec = spec_from_config(config())
    assert len(spec.layers) == 5 and len(spec.mixers) == len(spec.mlps) == 1
    assert spec.mixers[0] == GQA(hidden=48, heads=6, kv_heads=3, head_dim=16, rope=spec.mixers[0].rope, eps=1e-5)


def test_a_tied_model_declares_no_head():
    assert [w.name for w in spec_from_config(config(tie_word_embeddings=True)).globals()] == ["embedding", "final_norm"]
    assert [w.name for w in spec_from_config(config()).globals()] == ["embedding", "final_norm", "head"]


def test_fields_that_may_be_left_out_have_the_familys_defaults():
    fields = config()
    for name in ("num_key_value_heads", "head_dim", "tie_word_embeddings", "torch_dtype"):
        del fields[name]
    spec = spec_from_config(fields)
    assert (spec.mixers[0].kv_heads, spec.mixers[0].head_dim, spec.tied, spec.native) == (6, 8, False, "bf16")


@pytest.mark.parametrize("name, dtype", [("bf16", "bfloat16"), ("f16", "float16"), ("f32", "float32")])
@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_the_native_format_is_that_of_the_checkpoint(key, name, dtype):
    fields = config()
    del fields["torch_dtype"]
    assert spec_from_config(fields | {key: dtype}).native == name


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_key_value_heads": 4}, "6 attention heads do not divide into 4 key/value heads"),
        ({"hidden_act": "gelu"}, "'hidden_act' = 'gelu' is not supported"),
        ({"attention_bias": True}, "'attention_bias' = True is not supported"),
        ({"mlp_bias": True}, "'mlp_bias' = True is not supported"),
        ({"sliding_window": 4096}, "'sliding_window' is not understood and may change the maths"),
        ({"num_hidden_layers": 0}, "'num_hidden_layers' must be positive, not 0"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"hidden_size": "48"}, "'hidden_size' should be int, not '48'"),
        ({"hidden_size": True}, "'hidden_size' should be int, not True"),
        ({"vocab_size": 101.0}, "'vocab_size' should be int, not 101.0"),
        ({"tie_word_embeddings": 1}, "'tie_word_embeddings' should be bool, not 1"),
        ({"rms_norm_eps": None}, "lacks 'rms_norm_eps'"),
        ({"torch_dtype": "float8"}, "dtype 'float8' is not supported"),
        ({"torch_dtype": ["float32"]}, "'torch_dtype' should be str, not ['float32']"),
        ({"head_dim": 15}, "head dimension 15 is odd"),
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not supported"),
        ({"architectures": None}, "architecture (none given) is not supported"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' should be a list of names, not 'LlamaForCausalLM'"),
        ({"architectures": [["LlamaForCausalLM"]]}, "'architectures' should be a list of names"),
    ],
)
def test_a_config_that_cannot_be_followed_exactly_is_refused_by_field(changes, message):
    with pytest.raises(UserError) as error:
        spec_from_config(config(**changes))
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_null_field_is_as_if_it_were_not_there():
    assert spec_from_config(config(sliding_window=None, rope_scaling=None)) == spec_from_config(config())


def test_a_whole_number_will_do_where_a_real_one_is_wanted():
    assert spec_from_config(config(rms_norm_eps=1)).eps == 1.0
