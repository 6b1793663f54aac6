"""DeepSeek-V3 and Kimi K2: multi-head latent attention, dense layers first and then mixtures of experts."""

from jaxwafer.errors import UserError
from jaxwafer.model.attention import MLA
from jaxwafer.model.config import Config
from jaxwafer.model.glm4_moe import mixture
from jaxwafer.model.mlp import DenseMLP, MoE
from jaxwafer.model.rope import YarnScaling, rope_from_config
from jaxwafer.model.spec import Layer, ModelSpec


def spec(fields: dict) -> ModelSpec:
    config = Config(fields)
    eps = config.take("rms_norm_eps", float)
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
    config.require("add_cross_attention", False)
    config.require("is_decoder", False)
    config.require("pruned_heads", {})
    config.require("tie_encoder_decoder", False)
    # Of training, of a program that splits experts over ranks, and of the tensors (`model.layers.N.` past the last
    # layer) that predict the token after the next, which decoding here does not use.
    config.skip("aux_loss_alpha", "seq_aux", "ep_size", "output_router_logits", "num_nextn_predict_layers")
    mixer = _mixer(config, eps)
    dense = DenseMLP(hidden=mixer.hidden, intermediate=config.positive("intermediate_size"), eps=eps)
    number = config.positive("num_hidden_layers")
    first = _dense_layers(config, number)
    mlps = [dense] * first + [_experts(config, mixer.hidden, eps)] * (number - first)
    result = ModelSpec(
        family="deepseek",
        hidden=mixer.hidden,
        vocab=config.positive("vocab_size"),
        layers=tuple(Layer(mixer=mixer, mlp=mlp) for mlp in mlps),
        eps=eps,
        tied=config.take("tie_word_embeddings", bool, False),
        max_context=config.positive("max_position_embeddings"),
        native=config.native_format(),
    )
    config.finish()
    return result


def _mixer(config: Config, eps: float) -> MLA:
    heads, rope_dims = config.positive("num_attention_heads"), config.positive("qk_rope_head_dim")
    nope = config.positive("qk_nope_head_dim")
    # Every head has its own key; the field is a leftover of grouped-query attention.
    config.require("num_key_value_heads", heads)
    config.require("head_dim", rope_dims)
    config.require("qk_head_dim", nope + rope_dims)
    config.skip("rope_theta", "rope_scaling", "rope_parameters")
    interleaved = config.take("rope_interleave", bool, True)
    rope = rope_from_config(config.fields, dims=rope_dims, interleaved=interleaved)
    scale = (nope + rope_dims) ** -0.5
    if isinstance(rope.scaling, YarnScaling):
        scale *= rope.scaling.score_factor
    return MLA(
        hidden=config.positive("hidden_size"),
        heads=heads,
        nope=nope,
        rope_dims=rope_dims,
        value_dim=config.positive("v_head_dim"),
        rank=config.positive("kv_lora_rank"),
        rope=rope,
        scale=scale,
        eps=eps,
        q_rank=config.take("q_lora_rank", int, None),
    )


def _dense_layers(config: Config, layers: int) -> int:
    """How many layers come before the first mixture of experts."""
    config.require("moe_layer_freq", 1)
    first = config.take("first_k_dense_replace", int)
    if not 0 <= first <= layers:
        raise UserError(f"config.json: 'first_k_dense_replace' is {first}, but there are {layers} layers")
    return first


def _experts(config: Config, hidden: int, eps: float) -> MoE:
    # Programs differ in what they assume of these where they are missing.
    for name, kind in (("n_group", int), ("topk_group", int), ("norm_topk_prob", bool), ("n_shared_experts", int),
                       ("routed_scaling_factor", float)):  # fmt: skip
        config.take(name, kind)
    config.require("scoring_func", "sigmoid")
    config.require("topk_method", "noaux_tc")
    return mixture(config, hidden, eps)
