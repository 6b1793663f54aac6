"""gpt-oss against transformers: float tensors as transformers writes them, bfloat16 ones, and MXFP4 as published."""

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import safetensors.torch  # noqa: E402
from checkpoint import packings  # noqa: E402
from families import check  # noqa: E402
from hub_folder import write_tokenizer  # noqa: E402

from jaxwafer.checkpoint.hub import HubCheckpoint  # noqa: E402

# 5 experts over two cores; the window is shorter than a block of 8 tokens and than a chunk of the prompt.
BASE = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.15,
        "tie_word_embeddings": False, "num_local_experts": 5, "num_experts_per_tok": 2,
        "sliding_window": 5}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 8.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "truncate": False, "original_max_position_embeddings": 16}  # fmt: skip


def random_model(**changes):
    """Nothing is left at a value that does not show: attention is sharp, gates reach their limit."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**(BASE | {"rope_parameters": YARN} | changes))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                tensor.mul_(2)
            elif "gate_up_proj" in name:
                tensor.normal_(std=0.6 if "bias" not in name else 1.0)
            elif "bias" in name or "norm" in name:
                tensor.add_(0.2 * torch.randn_like(tensor))
            elif "sinks" in name:
                tensor.normal_(std=2.0)
    return model


def save(folder, model):
    model.save_pretrained(folder)
    write_tokenizer(folder, model.config.vocab_size)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def save_mxfp4(folder, model):
    """The layout of the published files: experts in blocks, [experts, outputs, inputs], and their scales."""
    tensors, rng = dict(model.state_dict()), np.random.default_rng(0)
    for name in [n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        parts, matrix = packings.gpt_oss(rng, experts, outputs, inputs)
        tensors |= {f"{name}_{end}": torch.from_numpy(part) for end, part in parts.items()}
        model.get_parameter(name).data.copy_(torch.from_numpy(matrix.swapaxes(1, 2)))
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    quantization = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    fields = model.config.to_dict() | {"architectures": ["GptOssForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(fields))
    write_tokenizer(folder, model.config.vocab_size)
    return model


@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
def test_float32(mesh, tmp_path):
    check(tmp_path, save(tmp_path, random_model()), mesh)


@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
def test_mxfp4_is_the_same_weights_dequantised(mesh, tmp_path):
    model = save_mxfp4(tmp_path, random_model())
    assert HubCheckpoint(tmp_path).stored("model.layers.0.mlp.experts.down_proj").name == "mxfp4"
    check(tmp_path, model, mesh)


def test_bfloat16_computed_in_float32(tmp_path):
    model = save(tmp_path, random_model(num_hidden_layers=2).to(torch.bfloat16))
    assert HubCheckpoint(tmp_path).stored("model.layers.0.mlp.experts.down_proj").name == "bf16"
    check(tmp_path, model, "2x2")


def test_other_windows_limits_and_layers(tmp_path):
    layers = ["full_attention", "full_attention", "sliding_attention"]
    check(tmp_path, save(tmp_path, random_model(
        num_hidden_layers=3, layer_types=layers, sliding_window=20, swiglu_limit=1.5, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
    )), "1x1")  # fmt: skip
