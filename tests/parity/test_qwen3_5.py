"""Qwen3.5, dense and with mixtures of experts, against transformers."""

import json

import numpy as np
import pytest
import safetensors.numpy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import check, engine, generate, write  # noqa: E402

# Three key heads with two value heads each, keys and values of unequal size, every head count awkward for two cores.
BASE = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 5, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 16, "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
        "linear_value_head_dim": 12, "max_position_embeddings": 256, "initializer_range": 0.1, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "full_attention_interval": 3}  # fmt: skip
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
           "shared_expert_intermediate_size": 24}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
KINDS = ["full_attention", "full_attention", "linear_attention", "full_attention", "linear_attention"]
CASES = {
    "plain": {},
    "tied, half of each head rotated, two taps": {
        "tie_word_embeddings": True, "rope_parameters": ROPE, "linear_conv_kernel_dim": 2,
    },
    "one value head a key, layers as listed": {"linear_num_value_heads": 3, "layer_types": KINDS},
}  # fmt: skip


def dense(**changes):
    return transformers.Qwen3_5TextConfig(**(BASE | {"intermediate_size": 80} | changes))


def experts(**changes):
    return transformers.Qwen3_5MoeTextConfig(**(BASE | EXPERTS | changes))


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(case, tmp_path):
    check(tmp_path, write(tmp_path, dense(**CASES[case])), "1x1", steps=True)


def test_an_uneven_mesh_gives_the_same(tmp_path):
    check(tmp_path, write(tmp_path, dense()), "3x2", steps=True)


@pytest.mark.parametrize("mesh", ["1x1", "3x2"])
def test_experts_are_those_of_transformers(mesh, tmp_path):
    check(tmp_path, write(tmp_path, experts()), mesh, steps=True)


def test_published_experts_are_fused(tmp_path):
    """In two tensors a layer, gate's rows before up's; transformers writes them one by one."""
    write(tmp_path, experts())
    prompts = [[5, 17, 3], [9] * 30]
    alone = generate(engine(tmp_path), prompts)
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    whole = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "text_config": json.loads(config.read_text())}
    config.write_text(json.dumps(whole))
    tensors = safetensors.numpy.load_file(file)
    for layer in range(BASE["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            np.stack([tensors.pop(f"{name}.{e}.{n}_proj.weight") for e in range(EXPERTS["num_experts"])])
            for n in ("gate", "up", "down")
        )
        tensors |= {f"{name}.gate_up_proj": np.concatenate([gate, up], 1), f"{name}.down_proj": down}
    safetensors.numpy.save_file(tensors, file)
    assert generate(engine(tmp_path, "1x2"), prompts) == alone


def test_the_text_of_a_multimodal_checkpoint_is_read(tmp_path):
    """Names under `model.language_model.`, the text's config in `text_config`, and tensors that are of no use here."""
    write(tmp_path, dense())
    prompts = [[5, 17, 3], [9] * 30]
    alone = generate(engine(tmp_path), prompts)
    config, file = tmp_path / "config.json", tmp_path / "model.safetensors"
    text = json.loads(config.read_text())
    mrope = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    text["rope_parameters"] |= mrope
    text |= {"mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32"}
    whole = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text, "vision_config": {"depth": 1},
             "image_token_id": 90, "model_type": "qwen3_5", "tie_word_embeddings": False}  # fmt: skip
    config.write_text(json.dumps(whole))
    tensors = safetensors.numpy.load_file(file)
    renamed = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
    renamed |= {name: tensors["model.norm.weight"] for name in ("mtp.norm.weight", "model.visual.norm.weight")}
    safetensors.numpy.save_file(renamed, file)
    assert generate(engine(tmp_path), prompts) == alone
