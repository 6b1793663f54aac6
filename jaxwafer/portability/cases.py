"""The fixed set of decodes that every platform runs: small random models, every mixer, every format, three meshes."""

from dataclasses import dataclass

from jaxwafer.checkpoint.random import RandomCheckpoint
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.convert import dense, dequantize, quantize
from jaxwafer.quant.formats import FORMATS, Format

SHARED = {"hidden_size": 64, "vocab_size": 256, "num_hidden_layers": 4, "intermediate_size": 128, "rms_norm_eps": 1e-5,
          "torch_dtype": "float32", "tie_word_embeddings": False, "max_position_embeddings": 512}  # fmt: skip
MODELS = {
    # grouped-query attention
    "llama": SHARED | {
        "architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "rope_theta": 10000.0,
    },
    # Kimi Delta Attention, multi-head latent attention and experts
    "kimi-linear": SHARED | {
        "architectures": ["KimiLinearForCausalLM"], "num_attention_heads": 4, "kv_lora_rank": 32,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "first_k_dense_replace": 1, "num_experts": 4,
        "num_experts_per_token": 2, "moe_intermediate_size": 32, "num_shared_experts": 1, "moe_renormalize": True,
        "routed_scaling_factor": 2.0, "model_max_length": 512,
        "linear_attn_config": {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 16, "num_heads": 4,
                               "short_conv_kernel_size": 4},
    },
    # Gated DeltaNet, and attention with an output gate
    "qwen3.5": SHARED | {
        "architectures": ["Qwen3_5ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "full_attention_interval": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip
MESHES = ("1x1", "2x1", "2x2")


@dataclass(frozen=True, kw_only=True)
class Case:
    """A decode. form: the format of `FORMATS` that matrices are stored in. like: the name of the case whose tokens and
    log-probabilities this one should have; "" for the first of a model. plain: the values of `form`, as float32."""

    model: str
    mesh: str = "1x1"
    form: str = "f32"
    plain: bool = False
    like: str = ""

    @property
    def name(self) -> str:
        return f"{self.model} {self.form}{' as f32' if self.plain else ''} {self.mesh}"


def cases(quick: bool) -> list[Case]:
    """All, or a few that a test can afford; one comes after the case that it should be like."""
    found = []
    for model in MODELS:
        first = Case(model=model)
        for mesh in MESHES:
            found.append(Case(model=model, mesh=mesh, like=first.name if mesh != first.mesh else ""))
    for form in FORMATS:
        if form != "f32":
            plain = Case(model="llama", form=form, plain=True)
            found += [plain, Case(model="llama", form=form, like=plain.name)]
    if quick:
        wanted = {"llama f32 1x1", "llama f32 2x2", "llama int4 as f32 1x1", "llama int4 1x1"}
        found = [case for case in found if case.name in wanted]
    return found


class StoredCheckpoint(RandomCheckpoint):
    """Random weights whose matrices are in a format, or are what that format holds of them, as float32."""

    def __init__(self, case: Case):
        super().__init__(MODELS[case.model])
        self.form, self.plain = FORMATS[case.form], case.plain

    def stored(self, name: str) -> Format:
        return FORMATS["f32"] if self.plain or len(self.shape(name)) != 2 else self.form

    def read(self, name: str) -> QuantizedArray:
        array = super().read(name)
        if len(self.shape(name)) != 2 or self.form.name == "f32":
            return array
        held = quantize(array.values, self.form)
        return dense(dequantize(held)[..., : self.shape(name)[-1]]) if self.plain else held
