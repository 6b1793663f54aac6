"""Qwen3-Next and Qwen3.5: Gated DeltaNet, in some layers gated attention with partial RoPE; norms stored around zero.

Tensors under `mtp.`, which predict the token after the next, and `model.visual.` are known and not read.
"""

from jaxwafer.errors import UserError
from jaxwafer.model.attention import GQA
from jaxwafer.model.config import Config
from jaxwafer.model.linear import GatedDeltaNet
from jaxwafer.model.mlp import DenseMLP, MoE, Router
from jaxwafer.model.rope import rope_from_config
from jaxwafer.model.spec import Layer, ModelSpec

SHIFT = 1.0
# Of rotations in space, which the positions of text make rotations by one position.
MULTIMODAL_ROPE = {"mrope_section", "mrope_interleaved"}


def next_spec(fields: dict) -> ModelSpec:
    """`Qwen3NextForCausalLM`."""
    config = Config(fields)
    every, only = config.positive("decoder_sparse_step", 1), config.take("mlp_only_layers", list, [])
    dense = [n in only or (n + 1) % every != 0 for n in range(config.positive("num_hidden_layers"))]
    renormalize = config.take("norm_topk_prob", bool, True)
    return _spec(config, "qwen3_next", fused=True, dense=dense, renormalize=renormalize)


def dense_spec(fields: dict) -> ModelSpec:
    """`Qwen3_5ForCausalLM`."""
    config = Config(fields)
    config.skip("mlp_only_layers")
    return _spec(config, "qwen3_5", fused=False, dense=[True] * config.positive("num_hidden_layers"))


def moe_spec(fields: dict, *, fused_experts: bool = False) -> ModelSpec:
    """`Qwen3_5MoeForCausalLM`. fused_experts: in two tensors a layer, as published, not two for each."""
    config = Config(fields)
    config.require("mlp_only_layers", [])
    config.require("norm_topk_prob", True)
    dense = [False] * config.positive("num_hidden_layers")
    return _spec(config, "qwen3_5_moe", fused=False, dense=dense, fused_experts=fused_experts)


def _spec(config: Config, family: str, *, fused: bool, dense: list[bool], renormalize: bool = True,
          fused_experts: bool = False) -> ModelSpec:  # fmt: skip
    hidden, eps, layers = config.positive("hidden_size"), config.take("rms_norm_eps", float), len(dense)
    config.require("hidden_act", "silu")
    config.require("mamba_ssm_dtype", "float32")
    # Of training, and of the layers that predict the token after the next.
    config.skip("output_router_logits", "router_aux_loss_coef")
    config.skip("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")
    full = _full_layers(config, layers)
    attention, linear = _attention(config, hidden, eps), _linear(config, hidden, eps, fused)
    mlp, experts = None, None
    if any(dense):
        mlp = DenseMLP(hidden=hidden, intermediate=config.positive("intermediate_size"), eps=eps, norm_shift=SHIFT)
    if not all(dense):
        experts = _experts(config, hidden, eps, renormalize, fused_experts)
        # Of dense MLPs, which there may be none of.
        config.skip("intermediate_size")
    result = ModelSpec(
        family=family,
        hidden=hidden,
        vocab=config.positive("vocab_size"),
        layers=tuple(
            Layer(mixer=attention if n in full else linear, mlp=mlp if dense[n] else experts) for n in range(layers)
        ),
        eps=eps,
        tied=config.take("tie_word_embeddings", bool, False),
        max_context=config.positive("max_position_embeddings"),
        native=config.native_format(),
        norm_shift=SHIFT,
    )
    config.finish()
    return result


def _full_layers(config: Config, layers: int) -> set[int]:
    """The layers, from 0, with full attention: as listed, or without a list each that ends an interval."""
    interval = config.positive("full_attention_interval", 4)
    counted = ["linear_attention" if (n + 1) % interval else "full_attention" for n in range(layers)]
    kinds = config.take("layer_types", list, counted)
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "linear_attention"}:
        raise UserError("config.json: 'layer_types' must be full_attention or linear_attention for every layer")
    return {n for n, kind in enumerate(kinds) if kind == "full_attention"}


def _attention(config: Config, hidden: int, eps: float) -> GQA:
    heads, kv_heads = config.heads()
    head_dim = config.positive("head_dim", 256)
    config.require("attn_output_gate", True)
    config.require("attention_bias", False)
    # Without it the window's size says nothing.
    config.require("use_sliding_window", False)
    config.skip("sliding_window", "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    fields = {
        name: {k: v for k, v in value.items() if k not in MULTIMODAL_ROPE} if isinstance(value, dict) else value
        for name, value in config.fields.items()
    }
    return GQA(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope_from_config(fields, dims=head_dim, partial=0.25),
        eps=eps,
        qk_norm=True,
        gate=True,
        norm_shift=SHIFT,
    )


def _linear(config: Config, hidden: int, eps: float, fused: bool) -> GatedDeltaNet:
    keys, values = config.positive("linear_num_key_heads"), config.positive("linear_num_value_heads")
    taps = config.positive("linear_conv_kernel_dim")
    if values % keys:
        raise UserError(f"config.json: {values} value heads do not divide into {keys} key heads")
    if taps < 2:
        raise UserError(f"config.json: 'linear_conv_kernel_dim' must be at least 2, not {taps}")
    return GatedDeltaNet(
        hidden=hidden,
        key_heads=keys,
        value_heads=values,
        key_dim=config.positive("linear_key_head_dim"),
        value_dim=config.positive("linear_value_head_dim"),
        taps=taps,
        eps=eps,
        fused=fused,
        norm_shift=SHIFT,
    )


def _experts(config: Config, hidden: int, eps: float, renormalize: bool, fused: bool) -> MoE:
    experts, chosen = config.chosen("num_experts")
    return MoE(
        hidden=hidden,
        experts=experts,
        intermediate=config.positive("moe_intermediate_size"),
        router=Router(score="softmax", chosen=chosen, renormalize=renormalize),
        eps=eps,
        shared=config.positive("shared_expert_intermediate_size"),
        shared_gate=True,
        fused=fused,
        halves=fused,
        norm_shift=SHIFT,
        shared_names=("shared_expert", "gate_proj", "up_proj", "down_proj"),
    )
