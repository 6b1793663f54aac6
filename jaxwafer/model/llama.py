"""Llama 2 and 3, SmolLM2 and other `LlamaForCausalLM` checkpoints."""

from jaxwafer.model.attention import GQA
from jaxwafer.model.config import Config
from jaxwafer.model.mlp import DenseMLP
from jaxwafer.model.rope import rope_from_config
from jaxwafer.model.spec import Layer, ModelSpec


def spec(fields: dict) -> ModelSpec:
    config = Config(fields)
    hidden = config.positive("hidden_size")
    heads, kv_heads = config.heads()
    head_dim = config.positive("head_dim", hidden // heads)
    eps = config.take("rms_norm_eps", float)
    config.require("hidden_act", "silu")
    config.require("attention_bias", False)
    config.require("mlp_bias", False)
    config.skip("rope_theta", "rope_scaling", "rope_parameters")
    mixer = GQA(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope_from_config(fields, dims=head_dim),
        eps=eps,
    )
    mlp = DenseMLP(hidden=hidden, intermediate=config.positive("intermediate_size"), eps=eps)
    result = ModelSpec(
        family="llama",
        hidden=hidden,
        vocab=config.positive("vocab_size"),
        layers=(Layer(mixer=mixer, mlp=mlp),) * config.positive("num_hidden_layers"),
        eps=eps,
        tied=config.take("tie_word_embeddings", bool, False),
        max_context=config.positive("max_position_embeddings"),
        native=config.native_format(),
    )
    config.finish()
    return result
