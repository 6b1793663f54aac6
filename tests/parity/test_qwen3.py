"""Qwen3, dense and with mixtures of experts, against transformers."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import check, check_laws, write  # noqa: E402

BASE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 12, "max_position_embeddings": 256, "initializer_range": 0.15,
        "tie_word_embeddings": False}  # fmt: skip
# Experts that do not divide into two cores, and are no multiple of 32 wide.
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 20, "norm_topk_prob": True}
DENSE = {"head of its own": {}, "tied": {"tie_word_embeddings": True}}
MOE = {
    "every layer": {},
    "not renormalized": {"norm_topk_prob": False},
    "every second layer": {"decoder_sparse_step": 2},
    "two dense layers": {"mlp_only_layers": [0, 3]},
    "one expert a token": {"num_experts_per_tok": 1},
}


@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
@pytest.mark.parametrize("case", DENSE)
def test_qwen3_is_that_of_transformers(case, mesh, tmp_path):
    check(tmp_path, write(tmp_path, transformers.Qwen3Config(**(BASE | DENSE[case]))), mesh)


@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
@pytest.mark.parametrize("case", MOE)
def test_qwen3_moe_is_that_of_transformers(case, mesh, tmp_path):
    check(tmp_path, write(tmp_path, transformers.Qwen3MoeConfig(**(BASE | EXPERTS | MOE[case]))), mesh)


@pytest.mark.parametrize("case", ["every layer", "two dense layers"])
def test_the_laws_hold_for_qwen3_moe(case, tmp_path):
    write(tmp_path, transformers.Qwen3MoeConfig(**(BASE | EXPERTS | MOE[case])))
    check_laws(tmp_path)
