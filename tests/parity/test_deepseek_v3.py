"""DeepSeek-V3 checkpoints as transformers writes them, against its own `DeepseekV3ForCausalLM`, in float32."""

import numpy as np
import pytest
from hub_folder import write_tokenizer
from scoring import log_probabilities

from jaxwafer.checkpoint.hub import HubCheckpoint
from jaxwafer.engine import Engine, Options
from jaxwafer.pipeline.queue import Sampling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# Every case is changes to this: 3 heads (padded on 2 cores), and key, value and RoPE dimensions that all differ.
BASE = {"vocab_size": 71, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 3,
        "num_key_value_heads": 3, "q_lora_rank": 12, "kv_lora_rank": 16, "qk_nope_head_dim": 10, "qk_rope_head_dim": 8,
        "v_head_dim": 6, "max_position_embeddings": 256, "initializer_range": 0.15, "tie_word_embeddings": False,
        "first_k_dense_replace": 3}  # fmt: skip
# Low frequencies are stretched, high ones kept, and rotated elements and scores both have factors of their own.
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 8.0, "beta_fast": 4.0, "beta_slow": 1.0, "mscale": 1.0,
        "mscale_all_dim": 0.7, "original_max_position_embeddings": 32}  # fmt: skip
CASES = {
    "plain": {},
    "yarn": {"rope_parameters": YARN},
    "full_rank_queries": {"q_lora_rank": None},
    "full_rank_queries_yarn_halves": {"q_lora_rank": None, "rope_parameters": YARN, "rope_interleave": False},
}
TOKENS, NEW = 60, 16


def write(folder, **changes):
    """Save a random model whose attention is sharp enough for positions to matter, and return it."""
    torch.manual_seed(0)
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**(BASE | changes))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            elif "q_" in name or "kv_a" in name:
                weight.mul_(3)
    model.save_pretrained(folder)
    write_tokenizer(folder, model.config.vocab_size)
    return model


def prompt(model) -> list[int]:
    return np.random.default_rng(1).integers(3, model.config.vocab_size, TOKENS).tolist()


def reference(model, tokens: list[int]) -> tuple[np.ndarray, list[int]]:
    """Log-probabilities of the whole vocabulary after each token, [T, vocabulary], and the greedy continuation."""
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
        ids = torch.tensor([tokens])
        model.generation_config.eos_token_id = None
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return torch.log_softmax(logits, -1).numpy(), out[0, len(tokens) :].tolist()


def check(folder, model, mesh: str) -> None:
    tokens = prompt(model)
    expected, continuation = reference(model, tokens)
    options = Options(mesh=mesh, dtype="f32", kv_cache="f32", max_context=80, block=8, prefill_chunk=64, burst=4)
    machine = Engine(HubCheckpoint(folder), options)
    everything = np.broadcast_to(np.arange(machine.spec.vocab), (len(tokens), machine.spec.vocab))
    np.testing.assert_allclose(log_probabilities(machine, tokens, everything), expected, atol=1e-4)
    events = list(machine.generate([tokens], Sampling(max_new_tokens=NEW, ignore_eos=True)))
    assert [t for event in events for t in event.tokens] == continuation


@pytest.mark.parametrize("mesh", ["1x1", "2x2", "1x3"])
@pytest.mark.parametrize("case", CASES)
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(case, mesh, tmp_path):
    check(tmp_path, write(tmp_path, **CASES[case]), mesh)
