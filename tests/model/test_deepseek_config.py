"""Reading the configs of DeepSeek-V3 and Kimi K2: sizes known from their publications, and what is refused."""

import pytest

from jaxwafer.cache.kv import CacheShape, KVFormat
from jaxwafer.checkpoint.open import open_config
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.model.kinds import DenseMLP
from jaxwafer.partition.placement import place
from jaxwafer.partition.plan import uniform
from jaxwafer.quant.formats import FORMATS


def read(**changes):
    return spec_from_config(open_config("deepseek-v3") | changes)


@pytest.mark.parametrize(
    "card, total, active, dense",
    [
        ("deepseek-v3", 671_026_419_200, 36_625_625_600, 3),
        ("kimi-k2-instruct", 1_026_408_232_448, 31_687_102_976, 1),
        ("kimi-k2-thinking", 1_026_408_232_448, 31_687_102_976, 1),
        ("kimi-k2.5", 1_026_408_232_448, 31_687_102_976, 1),
    ],
)
def test_published_sizes(card, total, active, dense):
    """Without the 14B of DeepSeek-V3's layer that predicts the token after the next; an embedding counts a row."""
    spec = spec_from_config(open_config(card))
    assert (spec.parameters, spec.active_parameters) == (total, active)
    assert [isinstance(layer.mlp, DenseMLP) for layer in spec.layers] == [n < dense for n in range(61)]


@pytest.mark.parametrize("card, beta_fast", [("kimi-k2-thinking", 1.0), ("kimi-k2.5", 32.0)])
def test_beta_fast_is_read_not_assumed(card, beta_fast):
    (mixer,) = spec_from_config(open_config(card)).mixers
    assert mixer.rope.scaling.beta_fast == beta_fast and mixer.rope.interleaved
    assert mixer.scale == pytest.approx(192**-0.5 * 1.4158883083359672**2)  # mscale 0.1 ln 64 + 1


@pytest.mark.parametrize("form, each", [("fp8", 576 + 1), ("bf16", 2 * 576), ("f32", 4 * 576)])
@pytest.mark.parametrize("cores", [1, 8])
def test_a_token_takes_576_elements_a_layer_however_many_cores(form, each, cores):
    spec = read()
    placement = place(spec, uniform(61, 1), lambda name, weight: FORMATS["bf16"], cores=cores)
    cache = CacheShape(placement=placement, format=KVFormat(name=form), block=1, blocks=cores)
    assert cache.wafer_token_bytes(0) == 61 * each


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"num_key_value_heads": 8}, "'num_key_value_heads' = 8 is not supported"),
        ({"attention_bias": True}, "'attention_bias' = True is not supported"),
        ({"scoring_func": "softmax"}, "'scoring_func' = 'softmax' is not supported"),
        ({"topk_method": "greedy"}, "'topk_method' = 'greedy' is not supported"),
        ({"moe_layer_freq": 2}, "'moe_layer_freq' = 2 is not supported"),
        ({"first_k_dense_replace": 62}, "'first_k_dense_replace' is 62, but there are 61 layers"),
        ({"n_group": 7}, "8 experts a token cannot come from 4 of 7 groups"),
        ({"n_group": None}, "lacks 'n_group'"),
        ({"norm_topk_prob": None}, "lacks 'norm_topk_prob'"),
        ({"kv_lora_rank": None}, "lacks 'kv_lora_rank'"),
        ({"qk_rope_head_dim": 63}, "63 is odd"),
        ({"pruned_heads": {"1": [2]}}, "'pruned_heads' = {'1': [2]} is not supported"),
        ({"index_topk": 2048}, "'index_topk' is not understood"),
    ],
)
def test_what_would_change_the_maths_is_refused_by_name(changes, message):
    with pytest.raises(UserError) as error:
        read(**changes)
    assert message in str(error.value)
