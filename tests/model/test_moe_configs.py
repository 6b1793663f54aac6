"""Qwen3 and GLM-4.x: from config.json to a ModelSpec, or to a refusal."""

import pytest

from jaxwafer.checkpoint.open import open_config
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.model.kinds import DenseMLP, MoE
from jaxwafer.model.mlp import Router

SHARED = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16, "vocab_size": 101,
          "intermediate_size": 80, "num_hidden_layers": 5, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
          "moe_intermediate_size": 20, "num_experts_per_tok": 2}  # fmt: skip
QWEN = SHARED | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
GLM = SHARED | {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "first_k_dense_replace": 1}


def card(name: str) -> dict:
    return open_config(name)


# Parameters of the published checkpoints. GLM's hold 356,785,898,816, of which 3,988,069,792 are the layer for
# multi-token prediction. Of Qwen3-0.6B's file the head, a copy of the embedding, is not counted.
@pytest.mark.parametrize(
    "name, parameters, active",
    [
        ("qwen3-0.6b", 596_049_920, 0.6e9),
        ("qwen3-8b", 8_190_735_360, 7.57e9),
        ("qwen3-32b", 32_762_123_264, 31.98e9),
        ("qwen3-30b-a3b", 30_532_122_624, 3.04e9),
        ("qwen3-235b-a22b", 235_093_634_560, 21.57e9),
        ("glm-4.6", 356_785_898_816 - 3_988_069_792, 32.86e9),
        ("kimi-k3", 2_779_484_476_000, 104.2e9),
        ("deepseek-v3", 671_026_419_200, 36.63e9),
        ("kimi-k2-instruct", 1_026_408_232_448, 31.69e9),
        ("glm-4.7", 356_785_898_816 - 3_988_069_792, 32.86e9),
    ],
)
def test_published_models_have_their_published_parameters(name, parameters, active):
    spec = spec_from_config(card(name))
    assert spec.parameters == parameters
    assert spec.active_parameters == pytest.approx(active, abs=0.05e9)


def test_glms_layer_for_multi_token_prediction_is_what_its_checkpoint_has_more():
    """Such a layer is an ordinary one, two more norms, a matrix [hidden, 2 · hidden] and a norm before the head."""
    spec = spec_from_config(card("glm-4.6"))
    last = spec.layers[-1]
    layer = sum(w.size for part in (last.mixer, last.mlp) for w in part.weights())
    assert layer + 2 * spec.hidden**2 + 3 * spec.hidden == 3_988_069_792


def test_which_layers_of_qwen_have_experts():
    def sparse(**changes):
        return [isinstance(x.mlp, MoE) for x in spec_from_config(QWEN | changes).layers]

    assert sparse() == [True] * 5
    assert sparse(decoder_sparse_step=2) == [False, True, False, True, False]
    assert sparse(mlp_only_layers=[0, 4]) == [False, True, True, True, False]
    assert sparse(decoder_sparse_step=2, mlp_only_layers=[1]) == [False, False, False, True, False]


def test_qwens_experts():
    mlp = spec_from_config(QWEN | {"norm_topk_prob": True}).layers[0].mlp
    assert mlp.router == Router(score="softmax", chosen=2)
    assert (mlp.experts, mlp.intermediate, mlp.shared) == (8, 20, 0)
    renamed = {("num_local_experts" if k == "num_experts" else k): v for k, v in QWEN.items()}
    assert spec_from_config(renamed) == spec_from_config(QWEN)
    assert not spec_from_config(QWEN).layers[0].mlp.router.renormalize
    (gate,) = (w for w in mlp.weights() if w.name == "gate")
    assert (gate.hub, gate.hub_shape) == ("mlp.experts.{expert}.gate_proj.weight", (20, 48))


def test_glm_as_published():
    spec = spec_from_config(card("glm-4.6"))
    assert [type(x.mlp) for x in spec.layers] == [DenseMLP] * 3 + [MoE] * 89
    mixer, mlp = spec.layers[3].mixer, spec.layers[3].mlp
    assert (mixer.rope.dims, mixer.head_dim, mixer.qk_norm, mixer.bias, mixer.output_bias) == (
        64,
        128,
        True,
        True,
        False,
    )
    assert mlp.router == Router(score="sigmoid", chosen=8, scale=2.5, bias=True)
    assert mlp.shared == 1536


def test_glms_share_of_rotated_dimensions_stands_in_either_place():
    plain = spec_from_config(GLM)
    assert plain.layers[0].mixer.rope.dims == 8
    for fields in (
        {"partial_rotary_factor": 0.25},
        {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ):
        assert spec_from_config(GLM | fields).layers[0].mixer.rope.dims == 4


@pytest.mark.parametrize(
    "base, changes, message",
    [
        (QWEN, {"num_experts": None}, "lacks 'num_local_experts'"),
        (QWEN, {"num_experts_per_tok": 9}, "a token cannot go through 9 of 8 experts"),
        (QWEN, {"mlp_only_layers": 3}, "'mlp_only_layers' should be list, not 3"),
        (QWEN, {"mlp_only_layers": ["3"]}, "'mlp_only_layers' should be a list of layers, not ['3']"),
        (QWEN, {"attention_bias": True}, "'attention_bias' = True is not supported"),
        (QWEN, {"use_sliding_window": True}, "'use_sliding_window' = True is not supported"),
        (QWEN, {"shared_expert_intermediate_size": 64}, "'shared_expert_intermediate_size' is not understood"),
        (QWEN, {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"]}, "'layer_types'"),
        (GLM, {"n_group": 3}, "2 experts a token cannot come from 1 of 3 groups ('n_group') of 8"),
        (GLM, {"n_group": 8, "topk_group": 4}, "cannot come from 4 of 8 groups"),
        (GLM, {"n_group": 2, "topk_group": 3}, "cannot come from 3 of 2 groups"),
        (GLM, {"partial_rotary_factor": 1.5}, "'partial_rotary_factor' must be at most 1, not 1.5"),
        (GLM, {"partial_rotary_factor": 0.2}, "head dimension 3 is odd"),
        (GLM, {"n_shared_experts": -1}, "'n_shared_experts' must not be negative"),
        (GLM, {"scoring_func": "softmax"}, "'scoring_func' is not understood"),
    ],
)
def test_a_config_that_cannot_be_followed_exactly_is_refused_by_field(base, changes, message):
    with pytest.raises(UserError) as error:
        spec_from_config(base | changes)
    assert message in str(error.value) and "\n" not in str(error.value)
