"""Kimi Linear and the text of Kimi K3: Kimi Delta Attention, in some layers latent attention without position
embedding, and experts. K3 adds gates, experts on a latent and block attention residuals."""

from jaxwafer.errors import UserError
from jaxwafer.model.attention import MLA
from jaxwafer.model.config import Config
from jaxwafer.model.linear import KDA
from jaxwafer.model.mlp import Activation, DenseMLP, MoE, Router
from jaxwafer.model.residual import BlockResidual
from jaxwafer.model.spec import Layer, ModelSpec

# transformers writes the fields of `linear_attn_config` under these names too.
WRITTEN = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}


def spec(fields: dict) -> ModelSpec:
    config = Config(fields)
    hidden, eps = config.positive("hidden_size"), config.take("rms_norm_eps", float)
    layers = config.positive("num_hidden_layers")
    activation = _activation(config)
    # Of training; and of tensors past the last layer that predict the token after the next.
    config.skip("output_router_logits", "num_nextn_predict_layers")
    # What older transformers wrote of every model.
    for name in ("add_cross_attention", "is_decoder", "tie_encoder_decoder"):
        config.require(name, False)
    config.require("pruned_heads", {})
    linear = linear_config(config)
    full, kda = full_layers(config, linear, layers), kda_mixer(linear, hidden, eps)
    linear.finish()
    mla = _mla(config, hidden, eps)
    dense = DenseMLP(hidden=hidden, intermediate=config.positive("intermediate_size"), eps=eps, activation=activation)
    sparse, experts = _sparse_layers(config, layers), _experts(config, hidden, eps, activation)
    every = config.positive("attn_res_block_size", None)
    result = ModelSpec(
        family="kimi_linear",
        hidden=hidden,
        vocab=config.positive("vocab_size"),
        layers=tuple(
            Layer(mixer=mla if n in full else kda, mlp=experts if n in sparse else dense) for n in range(layers)
        ),
        eps=eps,
        tied=config.take("tie_word_embeddings", bool, False),
        max_context=_context(config),
        native=config.native_format(),
        residual=BlockResidual(hidden=hidden, every=every, layers=layers, eps=eps) if every else None,
    )
    config.finish()
    return result


def _activation(config: Config) -> Activation:
    config.require("hidden_act", "silu", "situ")
    if config.take("hidden_act", str, "silu") == "silu":
        return Activation()
    limits = (
        config.positive("activation_situ_beta", kind=float),
        config.positive("activation_situ_linear_beta", kind=float),
    )
    return Activation(name="situ", limits=limits)


def _context(config: Config) -> int:
    """Kimi Linear and K3 name it differently."""
    either = config.positive("model_max_length", config.take("max_position_embeddings", int, 0) or ...)
    config.require("max_position_embeddings", either)
    return either


def linear_config(config: Config) -> Config:
    """`linear_attn_config`, with what transformers writes beside or instead of it."""
    fields = config.take("linear_attn_config", dict, {})
    for name, written in WRITTEN.items():
        value = config.take(written, int, None)
        if value is not None and fields.setdefault(name, value) != value:
            raise UserError(f"config.json: {written!r} is {value}, but linear_attn_config has {fields[name]}")
    return Config(fields)


def full_layers(config: Config, linear: Config, layers: int) -> set[int]:
    """The layers, from 0, with full attention: by the lists, from 1, of `linear_attn_config`, or by `layer_types`."""
    kinds = config.take("layer_types", list, [])
    full, kda = (linear.take(name, list, []) for name in ("full_attn_layers", "kda_layers"))
    listed = [(n - 1, "full_attention") for n in full] + [(n - 1, "linear_attention") for n in kda]
    each = sorted(listed) if listed else list(enumerate(kinds))
    if [n for n, _ in each] != list(range(layers)) or (kinds and [kind for _, kind in each] != kinds):
        raise UserError(
            f"config.json: 'full_attn_layers' and 'kda_layers' (or 'layer_types') must name {layers} layers once each"
        )
    if not {kind for _, kind in each} <= {"full_attention", "linear_attention"}:
        raise UserError("config.json: 'layer_types' other than full_attention and linear_attention are not supported")
    return {n for n, kind in each if kind == "full_attention"}


def kda_mixer(linear: Config, hidden: int, eps: float) -> KDA:
    """The mixer of a `linear_attn_config`; what is named there and not here makes `finish` fail."""
    dim, taps = linear.positive("head_dim"), linear.positive("short_conv_kernel_size")
    if taps < 2:
        raise UserError(f"config.json: 'short_conv_kernel_size' must be at least 2, not {taps}")
    bound = linear.take("gate_lower_bound", float, None)
    if bound is not None and bound > 0:
        raise UserError(f"config.json: 'gate_lower_bound' must not be above 0, as states would grow, not {bound}")
    return KDA(
        hidden=hidden,
        heads=linear.positive("num_heads"),
        key_dim=dim,
        value_dim=dim,
        taps=taps,
        eps=eps,
        decay_rank=dim,
        gate_rank=None if linear.take("use_full_rank_gate", bool, False) else dim,
        lower_bound=bound,
    )


def _mla(config: Config, hidden: int, eps: float) -> MLA:
    heads, nope = config.positive("num_attention_heads"), config.positive("qk_nope_head_dim")
    shared = config.positive("qk_rope_head_dim")
    # Every head has its own key.
    config.require("num_key_value_heads", heads)
    config.require("qk_head_dim", nope + shared)
    config.require("mla_use_nope", True)
    config.require("attention_bias", False)
    # Of grouped-query attention and of rotations, neither of which there is.
    config.skip("head_dim", "rope_theta", "rope_scaling", "rope_parameters")
    return MLA(
        hidden=hidden,
        heads=heads,
        nope=nope,
        rope_dims=shared,
        value_dim=config.positive("v_head_dim"),
        rank=config.positive("kv_lora_rank"),
        rope=None,
        scale=(nope + shared) ** -0.5,
        eps=eps,
        q_rank=config.positive("q_lora_rank", None),
        gate=config.take("mla_use_output_gate", bool, False),
    )


def _sparse_layers(config: Config, layers: int) -> set[int]:
    """The layers, from 0, with experts."""
    config.require("moe_layer_freq", 1)
    first, kinds = config.take("first_k_dense_replace", int, None), config.take("mlp_layer_types", list, None)
    if first is None and kinds is None:
        raise UserError("config.json lacks 'first_k_dense_replace'")
    counted = ["dense" if n < (first or 0) else "sparse" for n in range(layers)]
    if kinds is not None and (len(kinds) != layers or (first is not None and kinds != counted)):
        raise UserError("config.json: 'mlp_layer_types' is not what the number of layers and of dense ones make it")
    kinds = counted if kinds is None else kinds
    if not set(kinds) <= {"dense", "sparse"}:
        raise UserError("config.json: 'mlp_layer_types' other than dense and sparse are not supported")
    return {n for n, kind in enumerate(kinds) if kind == "sparse"}


def _experts(config: Config, hidden: int, eps: float, activation: Activation) -> MoE:
    experts, chosen = config.positive("num_experts"), config.positive("num_experts_per_token")
    groups, kept = config.positive("num_expert_group", 1), config.positive("topk_group", 1)
    config.require("moe_router_activation_func", "sigmoid")
    config.require("use_grouped_topk", True)
    config.require("topk_method", "noaux_tc")
    latent = config.positive("routed_expert_hidden_size", None)
    config.require("latent_moe_use_norm", latent is not None)
    if experts % groups or kept > groups or chosen > experts // groups * kept:
        raise UserError(
            f"config.json: {chosen} experts a token cannot come from {kept} of {groups} groups of {experts} experts"
        )
    intermediate = config.positive("moe_intermediate_size")
    return MoE(
        hidden=hidden,
        experts=experts,
        intermediate=intermediate,
        router=Router(
            score="sigmoid",
            chosen=chosen,
            renormalize=config.take("moe_renormalize", bool),
            scale=config.take("routed_scaling_factor", float),
            bias=True,
            groups=groups,
            kept_groups=kept,
        ),
        eps=eps,
        shared=intermediate * config.take("num_shared_experts", int),
        latent=latent,
        activation=activation,
        prefix="block_sparse_moe.",
        names=("w1", "w3", "w2"),
    )
