"""Qwen3, dense and with mixtures of experts, against transformers."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import check, write  # noqa: E402

BASE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 12, "max_position_embeddings": 256, "initializer_range": 0.15,
        "tie_word_embeddings": False}  # fmt: skip
# Experts that do not divide into two cores, and are no multiple of 32 wide.
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}
DENSE = {"head of its own": {}, "tied": {"tie_word_embeddings": True}}
MOE = {
    "experts in every layer": {},
    "two layers with experts": {"mlp_only_layers": [0], "decoder_sparse_step": 2, "norm_topk_prob": False},
}


@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
@pytest.mark.parametrize("case", DENSE)
def test_qwen3_is_that_of_transformers(case, mesh, tmp_path):
    check(tmp_path, write(tmp_path, transformers.Qwen3Config(**(BASE | DENSE[case]))), mesh)


@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
@pytest.mark.parametrize("case", MOE)
def test_qwen3_moe_is_that_of_transformers(case, mesh, tmp_path):
    check(tmp_path, write(tmp_path, transformers.Qwen3MoeConfig(**(BASE | EXPERTS | MOE[case]))), mesh)
