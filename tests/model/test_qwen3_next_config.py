"""Reading the configs of Qwen3-Next and Qwen3.5."""

import pytest

from jaxwafer.checkpoint.open import open_config
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.model.kinds import GQA, DenseMLP, GatedDeltaNet, MoE

# What transformers 5.24 counts in a model made from the same (text) config.
PARAMETERS = {
    "qwen3-next-80b-a3b-thinking": 79_674_391_296,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-27b": 26_895_998_464,
    "qwen3.5-35b-a3b": 34_660_610_688,
    "qwen3.5-397b-a17b": 396_346_350_336,
}


def following(**changes) -> dict:
    return open_config("qwen3-next-80b-a3b-thinking") | changes


def text(**changes) -> dict:
    whole = open_config("qwen3.5-0.8b")
    return whole | {"text_config": whole["text_config"] | changes}


@pytest.mark.parametrize("name", PARAMETERS)
def test_published_configs_have_as_many_parameters_as_transformers_counts(name):
    spec = spec_from_config(open_config(name))
    assert spec.parameters == PARAMETERS[name]
    kinds = [type(layer.mixer) for layer in spec.layers]
    assert kinds == ([GatedDeltaNet] * 3 + [GQA]) * (len(kinds) // 4)
    assert spec.norm_shift == 1.0


def test_attention_is_gated_and_rotates_a_quarter_of_each_head():
    mixer = spec_from_config(following()).layers[3].mixer
    assert (mixer.gate, mixer.qk_norm, mixer.norm_shift, mixer.rope.dims, mixer.rope.theta) == (
        True,
        True,
        1.0,
        64,
        1e7,
    )


def test_only_the_norms_of_heads_in_linear_layers_are_not_around_zero():
    shifts = {w.hub: w.shift for w in spec_from_config(following()).layers[0].mixer.weights()}
    assert shifts["input_layernorm.weight"] == 1.0
    assert shifts["linear_attn.norm.weight"] == 0.0


def test_layers_without_experts():
    mlps = [
        type(layer.mlp) for layer in spec_from_config(following(mlp_only_layers=[0, 5], decoder_sparse_step=2)).layers
    ]
    assert mlps[:6] == [DenseMLP, MoE, DenseMLP, MoE, DenseMLP, DenseMLP]


def test_published_experts_of_qwen3_5_are_halves_of_one_tensor():
    (gate,) = (w for w in spec_from_config(open_config("qwen3.5-35b-a3b")).layers[0].mlp.weights() if w.name == "gate")
    assert (gate.hub, gate.hub_shape) == ("mlp.experts.gate_up_proj", (256, 1024, 2048))


@pytest.mark.parametrize(
    "fields, message",
    [
        (following(linear_num_key_heads=12), "32 value heads do not divide into 12 key heads"),
        (following(linear_conv_kernel_dim=1), "at least 2"),
        (following(layer_types=["full_attention"] * 47), "'layer_types'"),
        (following(attention_bias=True), "'attention_bias' = True"),
        (following(surprise=1), "'surprise' is not understood"),
        (text(attn_output_gate=False), "'attn_output_gate' = False"),
        (text(mamba_ssm_dtype="bfloat16"), "'mamba_ssm_dtype' = 'bfloat16'"),
        (text(tie_word_embeddings=False), "'tie_word_embeddings' is not the same in 'text_config'"),
        (text() | {"audio_config": {}}, "'audio_config' is not understood"),
    ],
)
def test_what_would_change_the_maths_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        spec_from_config(fields)
