"""Qwen3-Next against transformers."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import check, write  # noqa: E402

# Three key heads with two value heads each, keys and values of unequal size, every head count awkward for two cores.
BASE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 16, "linear_num_key_heads": 3, "linear_num_value_heads": 6,
        "linear_key_head_dim": 8, "linear_value_head_dim": 12, "max_position_embeddings": 256,
        "initializer_range": 0.1, "rms_norm_eps": 1e-6, "full_attention_interval": 3, "num_experts": 7,
        "num_experts_per_tok": 3, "moe_intermediate_size": 20, "shared_expert_intermediate_size": 24}  # fmt: skip
CASES = {
    "every layer": {},
    "dense layers": {"mlp_only_layers": [0, 3], "norm_topk_prob": False},
}


def config(**changes):
    return transformers.Qwen3NextConfig(**(BASE | changes))


@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(case, tmp_path):
    check(tmp_path, write(tmp_path, config(**CASES[case])), "1x1", steps=True)


def test_an_uneven_mesh_gives_the_same(tmp_path):
    check(tmp_path, write(tmp_path, config(**CASES["dense layers"])), "3x2", steps=True)
