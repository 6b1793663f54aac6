"""Qwen3: `Qwen3ForCausalLM`, and `Qwen3MoeForCausalLM` with mixtures of experts."""

from collections.abc import Sequence

from jaxwafer.errors import UserError
from jaxwafer.model.attention import GQA
from jaxwafer.model.config import Config
from jaxwafer.model.kinds import MLP
from jaxwafer.model.mlp import DenseMLP, MoE, Router
from jaxwafer.model.rope import rope_from_config
from jaxwafer.model.spec import Layer, ModelSpec


def spec(fields: dict) -> ModelSpec:
    config = Config(fields)
    kinds = config.take("layer_types", list, [])
    if any(kind != "full_attention" for kind in kinds):
        raise UserError("config.json: 'layer_types' other than 'full_attention' are not supported")
    return _spec(config, "qwen3", [_dense(config)] * config.positive("num_hidden_layers"))


def moe_spec(fields: dict) -> ModelSpec:
    config = Config(fields)
    # Training's.
    config.skip("output_router_logits", "router_aux_loss_coef")
    layers, every = config.positive("num_hidden_layers"), config.positive("decoder_sparse_step", 1)
    without = config.take("mlp_only_layers", list, [])
    if not all(type(n) is int for n in without):
        raise UserError(f"config.json: 'mlp_only_layers' should be a list of layers, not {without!r}")
    dense, mixture = _dense(config), _mixture(config)
    sparse = [n not in without and (n + 1) % every == 0 for n in range(layers)]
    return _spec(config, "qwen3_moe", [mixture if s else dense for s in sparse])


def _dense(config: Config) -> DenseMLP:
    return DenseMLP(
        hidden=config.positive("hidden_size"),
        intermediate=config.positive("intermediate_size"),
        eps=config.take("rms_norm_eps", float),
    )


def _mixture(config: Config) -> MoE:
    # The name in published checkpoints, and the one that transformers 5 writes.
    name = "num_experts" if config.take("num_experts", int, None) else "num_local_experts"
    experts, chosen = config.chosen(name)
    return MoE(
        hidden=config.positive("hidden_size"),
        experts=experts,
        intermediate=config.positive("moe_intermediate_size"),
        router=Router(score="softmax", chosen=chosen, renormalize=config.take("norm_topk_prob", bool, False)),
        eps=config.take("rms_norm_eps", float),
    )


def _spec(config: Config, family: str, mlps: Sequence[MLP]) -> ModelSpec:
    hidden, eps = config.positive("hidden_size"), config.take("rms_norm_eps", float)
    heads, kv_heads = config.heads()
    head_dim = config.positive("head_dim", hidden // heads if family == "qwen3_moe" else 128)
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
    # Without it the window's size says nothing.
    config.require("use_sliding_window", False)
    config.skip("sliding_window", "rope_theta", "rope_scaling", "rope_parameters")
    mixer = GQA(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope_from_config(config.fields, dims=head_dim),
        eps=eps,
        qk_norm=True,
    )
    result = ModelSpec(
        family=family,
        hidden=hidden,
        vocab=config.positive("vocab_size"),
        layers=tuple(Layer(mixer=mixer, mlp=mlp) for mlp in mlps),
        eps=eps,
        tied=config.take("tie_word_embeddings", bool, False),
        max_context=config.positive("max_position_embeddings"),
        native=config.native_format(),
    )
    config.finish()
    return result
