"""GLM-4.5, 4.6 and 4.7: `Glm4MoeForCausalLM`. The layer for multi-token prediction after the last is not read."""

from jaxwafer.errors import UserError
from jaxwafer.model.attention import GQA
from jaxwafer.model.config import Config
from jaxwafer.model.mlp import DenseMLP, MoE, Router
from jaxwafer.model.rope import rope_from_config
from jaxwafer.model.spec import Layer, ModelSpec


def spec(fields: dict) -> ModelSpec:
    config = Config(fields)
    hidden, eps = config.positive("hidden_size"), config.take("rms_norm_eps", float)
    heads, kv_heads = config.heads()
    head_dim = config.positive("head_dim", hidden // heads)
    config.require("hidden_act", "silu")
    # Multi-token prediction, and training's.
    config.skip("num_nextn_predict_layers", "output_router_logits")
    config.skip("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    mixer = GQA(
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope_from_config(fields, dims=head_dim, partial=0.5),
        eps=eps,
        qk_norm=config.take("use_qk_norm", bool, False),
        bias=config.take("attention_bias", bool, False),
    )
    dense = DenseMLP(hidden=hidden, intermediate=config.positive("intermediate_size"), eps=eps)
    experts = mixture(config, hidden, eps)
    layers, first = config.positive("num_hidden_layers"), config.take("first_k_dense_replace", int)
    result = ModelSpec(
        family="glm4_moe",
        hidden=hidden,
        vocab=config.positive("vocab_size"),
        layers=tuple(Layer(mixer=mixer, mlp=dense if n < first else experts) for n in range(layers)),
        eps=eps,
        tied=config.take("tie_word_embeddings", bool, False),
        max_context=config.positive("max_position_embeddings"),
        native=config.native_format(),
    )
    config.finish()
    return result


def mixture(config: Config, hidden: int, eps: float) -> MoE:
    """DeepSeek-V3's mixture, which GLM has too: sigmoid scores, a bias for the choice, groups, shared experts."""
    experts, chosen = config.chosen("n_routed_experts")
    intermediate = config.positive("moe_intermediate_size")
    groups, kept = config.positive("n_group", 1), config.positive("topk_group", 1)
    if experts % groups or kept > groups or chosen > experts // groups * kept or (groups > 1 and experts < 2 * groups):
        raise UserError(
            f"config.json: {chosen} experts a token cannot come from {kept} of {groups} groups ('n_group') of {experts}"
        )
    router = Router(
        score="sigmoid",
        chosen=chosen,
        renormalize=config.take("norm_topk_prob", bool, True),
        scale=config.take("routed_scaling_factor", float, 1.0),
        bias=True,
        groups=groups,
        kept_groups=kept,
    )
    shared = config.take("n_shared_experts", int, 1)
    if shared < 0:
        raise UserError(f"config.json: 'n_shared_experts' must not be negative, as {shared} is")
    return MoE(
        hidden=hidden,
        experts=experts,
        intermediate=intermediate,
        router=router,
        eps=eps,
        shared=shared * intermediate,
    )
