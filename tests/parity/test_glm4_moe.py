"""GLM-4.5 to 4.7 against transformers."""

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from families import check, write  # noqa: E402

BASE = {"vocab_size": 97, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.15,
        "moe_intermediate_size": 20, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "first_k_dense_replace": 2, "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True,
        "tie_word_embeddings": False}  # fmt: skip
CASES = {
    "glm-4.6": {},
    "groups, nothing optional": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False, "use_qk_norm": False,
                                 "attention_bias": False, "first_k_dense_replace": 0},
}  # fmt: skip


@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
@pytest.mark.parametrize("case", CASES)
def test_glm4_moe_is_that_of_transformers(case, mesh, tmp_path):
    check(tmp_path, write(tmp_path, transformers.Glm4MoeConfig(**(BASE | CASES[case]))), mesh)
