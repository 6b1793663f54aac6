"""Kimi Linear against transformers."""

import json

import pytest
import safetensors.numpy

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import families  # noqa: E402

# Three heads of either kind over two cores; full attention at layers 2 and 5 (from 1), not multiples of anything.
BASE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "num_attention_heads": 3,
        "num_key_value_heads": 3, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10,
        "num_experts": 7, "num_experts_per_token": 3, "moe_intermediate_size": 20, "num_shared_experts": 2,
        "first_k_dense_replace": 1, "model_max_length": 256, "initializer_range": 0.15, "rms_norm_eps": 1e-5,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
LINEAR = {"full_attn_layers": [2, 5], "kda_layers": [1, 3, 4], "head_dim": 12, "num_heads": 3,
          "short_conv_kernel_size": 4}  # fmt: skip
DENSE = {"first_k_dense_replace": 5}
CASES = {
    "published": {},
    "dense, low-rank queries": DENSE | {"q_lora_rank": 14},
    "groups of experts": {"num_experts": 8, "num_expert_group": 4, "topk_group": 2, "moe_renormalize": False},
}
ALONE = DENSE | {"linear_attn_config": LINEAR | {"full_attn_layers": [], "kda_layers": [1, 2, 3, 4, 5]}}


def write(folder, **changes):
    """Save a random model with the names of the published checkpoint, and read it back."""
    config = transformers.KimiLinearConfig(**(BASE | {"linear_attn_config": LINEAR} | changes))
    model = families.write(folder, config)
    # transformers writes a dense MLP under the experts' prefix.
    file, dense = folder / "model.safetensors", ("gate_proj", "up_proj", "down_proj")
    tensors = {}
    for name, tensor in safetensors.numpy.load_file(file).items():
        parts = name.split(".")
        if parts[3:4] == ["block_sparse_moe"] and parts[4] in dense:
            parts[3] = "mlp"
        tensors[".".join(parts)] = tensor
    safetensors.numpy.save_file(tensors, file)
    return model


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(case, tmp_path):
    families.check(tmp_path, write(tmp_path, **CASES[case]), "1x1", steps=True)


def test_an_uneven_mesh_gives_the_same(tmp_path):
    families.check(tmp_path, write(tmp_path), "3x2", steps=True)


@pytest.mark.parametrize("mesh", ["1x1", "3x2"])
def test_a_model_without_attention(mesh, tmp_path):
    """transformers cannot generate without a layer of attention, so tokens are held against its logits alone."""
    model, tokens = write(tmp_path, **ALONE), [5, 17, 3, 9]
    (found,) = families.generate(families.engine(tmp_path, mesh), [tokens], 8)
    for _ in range(8):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    assert found == tokens[4:]


def test_a_config_without_what_transformers_adds_reads_the_same(tmp_path):
    """The published config has the lists and no `layer_types`; one that transformers made may have these alone."""
    write(tmp_path)
    file = tmp_path / "config.json"
    whole = json.loads(file.read_text())
    published = {k: v for k, v in whole.items() if not k.startswith("linear_") and "layer_types" not in k}
    published["linear_attn_config"] = whole["linear_attn_config"]
    derived = {k: v for k, v in whole.items() if k not in ("linear_attn_config", "first_k_dense_replace")}
    specs = []
    for fields in (whole, published, derived):
        file.write_text(json.dumps(fields))
        specs.append(families.engine(tmp_path).spec)
    assert specs[0] == specs[1] == specs[2]
