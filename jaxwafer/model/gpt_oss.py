"""gpt-oss: `GptOssForCausalLM`. Windows on alternate layers, attention sinks, a mixture with biases in every layer."""

from jaxwafer.errors import UserError
from jaxwafer.model.attention import GQA
from jaxwafer.model.config import Config
from jaxwafer.model.mlp import Activation, MoE, Router
from jaxwafer.model.rope import rope_from_config
from jaxwafer.model.spec import Layer, ModelSpec

# What a config without the field means.
THETA = 150000.0
SLIDING, FULL = "sliding_attention", "full_attention"


def spec(fields: dict) -> ModelSpec:
    config = Config(fields)
    hidden, eps = config.positive("hidden_size"), config.positive("rms_norm_eps", kind=float, most=1.0)
    heads, kv_heads = config.heads()
    head_dim = config.positive("head_dim", hidden // heads)
    bias = config.take("attention_bias", bool, True)
    config.require("hidden_act", "silu")
    config.require("swiglu_alpha", 1.702)
    # Training's, and a second name of what `rope_scaling` says.
    config.skip("output_router_logits", "router_aux_loss_coef", "initial_context_length")
    config.skip("rope_theta", "rope_scaling", "rope_parameters")
    experts, chosen = config.chosen("num_local_experts")
    config.require("experts_per_token", chosen)
    window = config.positive("sliding_window")
    rope = rope_from_config(fields | {"rope_theta": fields.get("rope_theta") or THETA}, dims=head_dim)

    def mixer(kind: str) -> GQA:
        return GQA(
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            rope=rope,
            eps=eps,
            bias=bias,
            output_bias=bias,
            sinks=True,
            window=window if kind == SLIDING else None,
        )

    mixture = MoE(
        hidden=hidden,
        experts=experts,
        intermediate=config.positive("intermediate_size"),
        router=Router(score="softmax-chosen", chosen=chosen, logit_bias=True),
        eps=eps,
        fused=True,
        expert_bias=True,
        activation=Activation(name="swiglu-oai", limits=(config.positive("swiglu_limit", 7.0, kind=float),)),
        router_name="router",
    )
    result = ModelSpec(
        family="gpt_oss",
        hidden=hidden,
        vocab=config.positive("vocab_size"),
        layers=tuple(Layer(mixer=mixer(kind), mlp=mixture) for kind in _kinds(config)),
        eps=eps,
        tied=config.take("tie_word_embeddings", bool, False),
        max_context=config.positive("max_position_embeddings"),
        native=config.native_format(),
    )
    config.finish()
    return result


def _kinds(config: Config) -> list[str]:
    """Of each layer; by default every other one, from the first on, has a window."""
    layers = config.positive("num_hidden_layers")
    kinds = config.take("layer_types", list, [FULL if n % 2 else SLIDING for n in range(layers)])
    if len(kinds) != layers or not all(kind in (SLIDING, FULL) for kind in kinds):
        raise UserError(f"config.json: 'layer_types' should name {SLIDING!r} or {FULL!r} for each of {layers} layers")
    return kinds
