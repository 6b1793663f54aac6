"""What a model is: config.json → ModelSpec. One file per family."""

from functools import partial

from jaxwafer.errors import UserError
from jaxwafer.model import deepseek, glm4_moe, kimi_linear, llama, qwen3, qwen3_next
from jaxwafer.model.multimodal import text_of
from jaxwafer.model.spec import ModelSpec

# architecture in config.json → the family's reader
FAMILIES = {
    "DeepseekV3ForCausalLM": deepseek.spec,
    "Glm4MoeForCausalLM": glm4_moe.spec,
    "KimiK2ForCausalLM": deepseek.spec,
    "KimiK25ForConditionalGeneration": text_of(deepseek.spec),
    "KimiLinearForCausalLM": kimi_linear.spec,
    "LlamaForCausalLM": llama.spec,
    "Qwen3ForCausalLM": qwen3.spec,
    "Qwen3MoeForCausalLM": qwen3.moe_spec,
    "Qwen3NextForCausalLM": qwen3_next.next_spec,
    "Qwen3_5ForCausalLM": qwen3_next.dense_spec,
    "Qwen3_5ForConditionalGeneration": text_of(qwen3_next.dense_spec),
    "Qwen3_5MoeForCausalLM": qwen3_next.moe_spec,
    "Qwen3_5MoeForConditionalGeneration": text_of(partial(qwen3_next.moe_spec, fused_experts=True)),
}


def spec_from_config(fields: dict) -> ModelSpec:
    """The ModelSpec of a Hugging Face config; an architecture or field that is not understood is a UserError."""
    names = fields.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"config.json: 'architectures' should be a list of names, not {names!r}")
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name](fields)
    known = ", ".join(sorted(FAMILIES))
    raise UserError(f"architecture {', '.join(names) or '(none given)'} is not supported (supported: {known})")
