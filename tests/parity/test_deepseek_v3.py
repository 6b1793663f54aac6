"""DeepSeek-V3 as transformers writes it: latent attention with and without its variants, dense layers and mixtures."""

import itertools

import numpy as np
import pytest

transformers = pytest.importorskip("transformers")

from families import check, prompt, reference, write  # noqa: E402

# 3 heads (padded on 2 cores); key, value and RoPE dimensions that all differ; dense layers alone.
BASE = {"vocab_size": 71, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 3,
        "num_key_value_heads": 3, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
        "v_head_dim": 6, "max_position_embeddings": 256, "initializer_range": 0.25, "tie_word_embeddings": False,
        "first_k_dense_replace": 5}  # fmt: skip
# Low frequencies are stretched, high ones kept, and rotated elements and scores both have factors of their own.
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 0.7, "original_max_position_embeddings": 32}  # fmt: skip
PLAIN = {"rope_type": "default", "rope_theta": 100.0}
# 8 experts in 4 groups, of which 2 are kept; one dense layer, as Kimi K2 has it.
MIXTURE = {"first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_routed_experts": 8, "n_shared_experts": 1,
           "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}  # fmt: skip
CASES = {
    "plain": {"rope_parameters": PLAIN},
    "full_rank_queries": {"rope_parameters": PLAIN, "q_lora_rank": None},
    "yarn": {"rope_parameters": YARN},
    "full_rank_queries_yarn": {"rope_parameters": YARN, "q_lora_rank": None},
    "halves": {"rope_parameters": YARN, "rope_interleave": False},
    "mixture": {"rope_parameters": YARN} | MIXTURE,
}


def config(case: str):
    return transformers.DeepseekV3Config(**(BASE | CASES[case]))


@pytest.mark.parametrize(
    "case, mesh", [*((case, "2x2") for case in CASES), *itertools.product(("plain", "mixture"), ("1x1", "1x3"))]
)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(case, mesh, tmp_path):
    check(tmp_path, write(tmp_path, config(case)), mesh)


def test_what_the_cases_vary_matters_at_these_lengths(tmp_path):
    """Were RoPE, its scaling or the order of its pairs ignored, a case would fail by far more than its tolerance."""
    found = {}
    for case in ("plain", "yarn", "halves"):
        model = write(tmp_path / case, config(case))
        found[case] = reference(model, prompt(model))[0]
    assert np.abs(found["plain"] - found["yarn"]).max() > 0.1 and np.abs(found["halves"] - found["yarn"]).max() > 0.1
