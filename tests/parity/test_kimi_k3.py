"""Kimi K3 against mlx-lm on the CPU: transformers does not have it."""

import json

import numpy as np
import pytest
import safetensors.numpy

mx = pytest.importorskip("mlx.core")
kimi_k3 = pytest.importorskip("mlx_lm.models.kimi_k3")

from hub_folder import write_checkpoint  # noqa: E402
from scoring import log_probabilities  # noqa: E402
from tiny_k3 import tiny_k3  # noqa: E402

from jaxwafer.checkpoint.hub import HubCheckpoint  # noqa: E402
from jaxwafer.engine import Engine  # noqa: E402
from jaxwafer.options import Options  # noqa: E402
from jaxwafer.pipeline.queue import Sampling  # noqa: E402

# Ten layers: full attention in the fourth, the eighth and the last; five blocks; four layers on the first of three
# wafers and three on the others.
LAYERS, TOKENS, NEW = 10, 60, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint with the names of the published one, among them a tensor of the vision tower."""
    path = write_checkpoint(tmp_path_factory.mktemp("k3"), tiny_k3(LAYERS))
    file = path / "model.safetensors"
    tensors = {f"language_model.{name}": tensor for name, tensor in safetensors.numpy.load_file(file).items()}
    tensors["vision_tower.patch_embed.proj.weight"] = np.ones((2, 3), np.float32)
    safetensors.numpy.save_file(tensors, file)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    """mlx-lm's model. That its names and shapes are those of the file is checked by its own strict loading."""
    mx.set_default_device(mx.cpu)
    # Without the system's C++ compiler.
    mx.disable_compile()
    fields = json.loads((folder / "config.json").read_text())
    model = kimi_k3.Model(kimi_k3.ModelArgs.from_dict(fields))
    weights = model.sanitize(mx.load(str(folder / "model.safetensors")))
    model.load_weights(list(weights.items()), strict=True)
    return model.eval()


@pytest.fixture(scope="module")
def expected(reference):
    """A prompt, log-probabilities of the whole vocabulary after each of its tokens, and the greedy continuation."""
    tokens = np.random.default_rng(1).integers(3, 97, TOKENS).tolist()
    logits = np.array(reference(mx.array([tokens])))[0].astype(np.float64)
    cache, step, found = reference.make_cache(), tokens, []
    for _ in range(NEW):
        found.append(int(mx.argmax(reference(mx.array([step]), cache=cache)[0, -1])))
        step = found[-1:]
    return tokens, logits - np.log(np.exp(logits).sum(-1, keepdims=True)), found


@pytest.mark.parametrize("mesh", ["1x1", "3x2"])
def test_log_probabilities_and_greedy_tokens_are_those_of_mlx_lm(mesh, folder, expected):
    tokens, scores, continuation = expected
    options = Options(
        mesh=mesh, dtype="f32", kv_cache="f32", activations="float", max_context=128, block=8, prefill_chunk=64, burst=4
    )
    machine = Engine(HubCheckpoint(folder), options)
    everything = np.broadcast_to(np.arange(machine.spec.vocab), (len(tokens), machine.spec.vocab))
    np.testing.assert_allclose(log_probabilities(machine, tokens, everything), scores, atol=1e-4)
    events = machine.generate([tokens], Sampling(max_new_tokens=NEW, ignore_eos=True))
    assert [t for event in events for t in event.tokens] == continuation
    assert len(set(continuation)) > NEW // 2


def test_every_part_of_the_model_matters(folder, reference, expected):
    """With a kind of tensor left at zero, the reference itself moves by far more than the tolerance."""
    tokens, scores, _ = expected
    weights = reference.sanitize(mx.load(str(folder / "model.safetensors")))
    for part in ("A_log", "dt_bias", "self_attn.g_proj", "q_a_layernorm", "embed_q", "e_score_correction_bias",
                 "routed_expert_norm", "self_attention_res_proj", "mlp_res_norm", "output_attn_res_proj"):  # fmt: skip
        changed = {name: mx.zeros_like(w) if part in name else w for name, w in weights.items()}
        assert sum(part in name for name in weights), part
        reference.load_weights(list(changed.items()), strict=True)
        for layer in reference.layers:
            layer._attn_res_w_eff = layer._mlp_res_w_eff = None
        reference.model._output_res_w_eff = None
        logits = np.array(reference(mx.array([tokens])))[0].astype(np.float64)
        assert np.abs(logits - np.log(np.exp(logits).sum(-1, keepdims=True)) - scores).max() > 1e-2, part
