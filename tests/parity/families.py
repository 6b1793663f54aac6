"""A family's tiny random checkpoint, as transformers writes it, against transformers' own model, in float32."""

import numpy as np
import torch
import transformers
from hub_folder import write_tokenizer
from scoring import log_probabilities

from jaxwafer.checkpoint.hub import HubCheckpoint
from jaxwafer.engine import Engine
from jaxwafer.options import Options
from jaxwafer.pipeline.queue import Sampling

TOKENS, NEW = 60, 16


def write(folder, config: transformers.PretrainedConfig) -> torch.nn.Module:
    """Save a random model of `config` and read it back. Nothing in it is left at a value that does not show: attention
    is sharp, norms, biases and routers are random, and recurrent state lasts for many tokens and is not small beside
    the epsilon of the norm that follows it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "inv_freq" in name:
                continue
            if "A_log" in name:
                tensor.uniform_(0.02, 1.0).log_()
            elif "conv1d" in name:
                tensor.normal_(std=0.7)
            elif tensor.ndim == 1:
                tensor.add_(0.2 * torch.randn_like(tensor))
            elif "q_proj" in name or "k_proj" in name:
                tensor.mul_(2)
            elif "mlp.gate.weight" in name:
                tensor.normal_(std=0.3)
    model.save_pretrained(folder)
    write_tokenizer(folder, config.vocab_size)
    return type(model).from_pretrained(folder, dtype=torch.float32).eval()


def prompt(model) -> list[int]:
    return np.random.default_rng(1).integers(3, model.config.vocab_size, TOKENS).tolist()


def reference(model, tokens: list[int], *, steps: bool = False) -> tuple[np.ndarray, list[int]]:
    """Log-probabilities of the whole vocabulary after each token, [T, vocabulary], and the greedy continuation.

    steps: token by token. transformers' chunks of the delta rule take differences of cumulative decays, and were found
    3 to 4 times as far from its result in float64 as its steps and the engine's chunks.
    """
    ids = torch.tensor([tokens])
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        if steps:
            logits, cache = [], None
            for token in tokens:
                out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                logits.append(out.logits[0, -1])
            logits = torch.stack(logits)
        else:
            logits = model(ids).logits[0]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return torch.log_softmax(logits, -1).numpy(), out[0, len(tokens) :].tolist()


def engine(folder, mesh: str = "1x1", **options) -> Engine:
    fixed = {
        "dtype": "f32",
        "kv_cache": "f32",
        "activations": "float",
        "max_context": 128,
        "block": 8,
        "prefill_chunk": 64,
        "burst": 4,
    }
    return Engine(HubCheckpoint(folder), Options(mesh=mesh, **(fixed | options)))


def generate(machine: Engine, prompts: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Greedy tokens of each prompt, all in flight together."""
    requests = [machine.submit(p, Sampling(max_new_tokens=new, ignore_eos=True)) for p in prompts]
    while machine.queue.busy:
        machine.step()
    return [r.tokens for r in requests]


def check(folder, model, mesh: str, *, steps: bool = False) -> None:
    """The engine's log-probabilities of the whole vocabulary at every position within 1e-4, its greedy tokens equal."""
    tokens = prompt(model)
    expected, continuation = reference(model, tokens, steps=steps)
    machine = engine(folder, mesh)
    everything = np.broadcast_to(np.arange(machine.spec.vocab), (len(tokens), machine.spec.vocab))
    np.testing.assert_allclose(log_probabilities(machine, tokens, everything), expected, atol=1e-4)
    assert generate(machine, [tokens]) == [continuation]
