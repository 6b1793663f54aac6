"""Reading the config of Kimi Linear."""

import pytest

from jaxwafer.checkpoint.open import open_config
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.model.config import Config
from jaxwafer.model.kimi_linear import kda_mixer
from jaxwafer.model.kinds import KDA, MLA, DenseMLP, MoE

NAME = "kimi-linear-48b-a3b-instruct"


def config(**changes) -> dict:
    return open_config(NAME) | changes


def linear(**changes) -> dict:
    return config(linear_attn_config=config()["linear_attn_config"] | changes)


def test_the_published_config_has_the_parameters_of_the_published_checkpoint():
    """49,122,681,728 elements in its 20 files; attention at 4, 8, … and 27, so not where layer % 4 puts it."""
    spec = spec_from_config(config())
    assert spec.parameters == 49_122_681_728
    full = [n for n, layer in enumerate(spec.layers, 1) if isinstance(layer.mixer, MLA)]
    assert full == [4, 8, 12, 16, 20, 24, 27]
    assert sum(isinstance(layer.mixer, KDA) for layer in spec.layers) == 20
    assert [type(layer.mlp) for layer in spec.layers] == [DenseMLP] + [MoE] * 26


def test_hub_names_are_those_of_the_published_checkpoint():
    spec = spec_from_config(config())
    first, fourth = ({w.hub: w.hub_shape for p in (layer.mixer, layer.mlp) for w in p.weights()}
                     for layer in (spec.layers[0], spec.layers[3]))  # fmt: skip
    assert first["self_attn.A_log"] == (1, 1, 32, 1)
    assert first["self_attn.v_conv1d.weight"] == (4096, 1, 4)
    assert first["self_attn.f_b_proj.weight"] == (4096, 128)
    assert first["mlp.gate_proj.weight"] == (9216, 2304)
    assert fourth["self_attn.kv_b_proj.weight"] == (8192, 512)
    assert fourth["block_sparse_moe.experts.{expert}.w2.weight"] == (2304, 1024)
    assert fourth["block_sparse_moe.gate.e_score_correction_bias"] == (256,)
    assert fourth["block_sparse_moe.shared_experts.up_proj.weight"] == (1024, 2304)


@pytest.mark.parametrize(
    "fields, message",
    [
        (linear(kda_layers=[1, 2, 3]), "must name 27 layers once each"),
        (linear(kda_layers=[4] + [n for n in range(1, 27) if n % 4]), "must name 27 layers once each"),
        (linear(gate_norm=True), "'gate_norm' is not understood"),
        (linear(short_conv_kernel_size=1), "at least 2"),
        (config(layer_types=["linear_attention"] * 27), "must name 27 layers"),
        (config(linear_num_heads=16), "'linear_num_heads' is 16"),
        (config(mla_use_nope=False), "'mla_use_nope' = False is not supported"),
        (config(num_key_value_heads=8), "'num_key_value_heads' = 8"),
        (config(moe_router_activation_func="softmax"), "'moe_router_activation_func' = 'softmax'"),
        (config(num_experts_per_token=300), "300 experts a token"),
        (config(mlp_layer_types=["sparse"] * 27), "'mlp_layer_types'"),
        (config(attn_res_block_count=12), "'attn_res_block_count' is not understood"),
    ],
)
def test_what_would_change_the_maths_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        spec_from_config(fields)


def test_the_variant_of_kimi_k3_is_read_from_its_linear_attn_config():
    fields = {"head_dim": 128, "num_heads": 96, "short_conv_kernel_size": 4, "gate_lower_bound": -5.0,
              "use_full_rank_gate": True}  # fmt: skip
    kind = kda_mixer(Config(fields), 7168, 1e-5)
    assert (kind.lower_bound, kind.gate_rank, kind.decay_rank) == (-5.0, None, 128)
    shapes = {w.hub.removeprefix("self_attn."): w.hub_shape for w in kind.weights()}
    assert shapes["A_log"] == (1, 1, 96, 1)
    assert shapes["g_proj.weight"] == (12288, 7168)


def test_a_bound_that_lets_states_grow_is_refused():
    with pytest.raises(UserError, match="'gate_lower_bound' must not be above 0"):
        kda_mixer(
            Config({"head_dim": 4, "num_heads": 1, "short_conv_kernel_size": 4, "gate_lower_bound": 5.0}), 8, 1e-5
        )
