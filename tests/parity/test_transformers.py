"""Llama checkpoints as transformers writes them, against its own `LlamaForCausalLM`, in float32."""

import numpy as np
import pytest
from hub_folder import write_tokenizer
from scoring import log_probabilities

from jaxwafer.checkpoint.hub import HubCheckpoint
from jaxwafer.engine import Engine
from jaxwafer.options import Options
from jaxwafer.pipeline.queue import Sampling

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
# Every case is changes to this: 5 layers, 3 groups of 2 heads, a prime vocabulary, a head of its own.
BASE = {"vocab_size": 131, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 5, "num_attention_heads": 6,
        "num_key_value_heads": 3, "head_dim": 8, "max_position_embeddings": 256, "initializer_range": 0.15,
        "tie_word_embeddings": False}  # fmt: skip
CASES = {
    "gqa": {},
    "mha": {"num_key_value_heads": 6},
    "mqa": {"num_key_value_heads": 1},
    "head_dim": {"head_dim": 20},
    "tied": {"tie_word_embeddings": True},
    "llama3_rope": {"rope_parameters": LLAMA3},
    "even_vocabulary": {"vocab_size": 128},
}
TOKENS, NEW = 90, 16


def write(folder, dtype=torch.float32, max_shard_size="1GB", **changes):
    """Save a random model whose attention is sharp enough for positions to matter; it, read back in float32."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(BASE | changes))).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(0.2 * torch.randn_like(weight))
            elif "q_proj" in name or "k_proj" in name:
                weight.mul_(2)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder, model.config.vocab_size)
    # Not model.to(float32): its rotary frequencies were rounded with its weights.
    return transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)


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


def run(folder, mesh: str, tokens: list[int]) -> tuple[np.ndarray, list[int], np.ndarray]:
    """(log-probabilities, greedy tokens, `Engine.score` of the prompt)."""
    options = Options(
        mesh=mesh,
        dtype="f32",
        kv_cache="f32",
        activations="float",
        max_context=128,
        block=8,
        prefill_chunk=128,
        burst=4,
    )
    machine = Engine(HubCheckpoint(folder), options)
    everything = np.broadcast_to(np.arange(machine.spec.vocab), (len(tokens), machine.spec.vocab))
    scored = log_probabilities(machine, tokens, everything)
    events = list(machine.generate([tokens], Sampling(max_new_tokens=NEW, ignore_eos=True)))
    return scored, [t for event in events for t in event.tokens], machine.score(tokens)


def check(folder, model, mesh: str) -> None:
    tokens = prompt(model)
    expected, continuation = reference(model, tokens)
    scored, generated, own = run(folder, mesh, tokens)
    np.testing.assert_allclose(scored, expected, atol=1e-4)
    assert generated == continuation
    np.testing.assert_allclose(own, expected[np.arange(TOKENS - 1), tokens[1:]], atol=1e-4)


@pytest.mark.parametrize("case, mesh", [("gqa", "1x1"), *((case, "2x2") for case in CASES)])
def test_log_probabilities_and_greedy_tokens_are_those_of_transformers(case, mesh, tmp_path):
    model = write(tmp_path, **CASES[case])
    check(tmp_path, model, mesh)


def test_a_bfloat16_checkpoint_computed_in_float32(tmp_path):
    model = write(tmp_path, dtype=torch.bfloat16)
    assert HubCheckpoint(tmp_path).stored("model.layers.0.mlp.up_proj.weight").name == "bf16"
    check(tmp_path, model, "2x2")


def test_a_checkpoint_in_shards(tmp_path):
    model = write(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 3 and not (tmp_path / "model.safetensors").exists()
    check(tmp_path, model, "2x2")


def test_scaled_frequencies_matter_at_these_lengths(tmp_path):
    """Were the scaling ignored, the case `llama3_rope` would fail by far more than its tolerance."""
    scaled = write(tmp_path / "scaled", rope_parameters=LLAMA3)
    plain = write(tmp_path / "plain", rope_parameters={"rope_type": "default", "rope_theta": 1000.0})
    tokens = prompt(scaled)
    assert np.abs(reference(scaled, tokens)[0] - reference(plain, tokens)[0])[32:].max() > 0.1
