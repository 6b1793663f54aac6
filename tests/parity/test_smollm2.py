"""SmolLM2-135M-Instruct as published in GGUF (Q4_1), in float32, against a forward pass in NumPy on weights that the
`gguf` library read and dequantised."""

from pathlib import Path

import gguf
import numpy as np
import pytest
from scoring import log_probabilities

from jaxwafer.checkpoint.cards import card
from jaxwafer.checkpoint.gguf import GGUFCheckpoint
from jaxwafer.engine import Engine
from jaxwafer.options import Options
from jaxwafer.pipeline.queue import Sampling
from jaxwafer.quant.convert import dequantize

# Not part of the project: it may stand beside the checkout.
TEXT = Path(__file__).parents[2].parent / "shared" / "data" / "wikitext2-test-head.txt"
CARD = card("smollm2-135m-instruct")
PROMPT = "The capital of France is"
LAYERS, HEADS, KV_HEADS, DIM, THETA, EPS = 30, 9, 3, 64, 100000.0, 1e-5

pytestmark = pytest.mark.skipif(
    not CARD.ready, reason=f"{CARD.name} is not in the user's cache; run: jaxwafer fetch {CARD.name}"
)


def engine(mesh: str = "1x1", **options) -> Engine:
    fixed = {
        "mesh": mesh,
        "weights": "native",
        "dtype": "f32",
        "kv_cache": "f32",
        "activations": "float",
        "prefill_chunk": 32,
    }
    return Engine(GGUFCheckpoint(CARD.weights_path), Options(**(fixed | {"max_context": 64} | options)))


@pytest.fixture(scope="module")
def one_device():
    return engine()


@pytest.fixture(scope="module")
def tensors() -> dict[str, np.ndarray]:
    """float32, under the names and in the row order of the file."""
    found = gguf.GGUFReader(CARD.weights_path).tensors
    return {t.name: gguf.quants.dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for t in found}


def forward(w: dict[str, np.ndarray], tokens: list[int]) -> np.ndarray:
    """Logits [T, vocabulary] in float32. RoPE turns neighbours, as the rows of a GGUF file have it."""
    length = len(tokens)
    angle = np.arange(length)[:, None] * THETA ** (-np.arange(0, DIM, 2) / DIM)
    cos, sin = (f(angle).astype(np.float32)[:, None] for f in (np.cos, np.sin))

    def norm(x, weight):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + np.float32(EPS)) * weight

    def rotate(x):
        even, odd = x[..., 0::2], x[..., 1::2]
        return np.stack([even * cos - odd * sin, odd * cos + even * sin], -1).reshape(x.shape)

    x = w["token_embd.weight"][tokens]
    for layer in range(LAYERS):
        p = {name.split(".", 2)[2]: t for name, t in w.items() if name.startswith(f"blk.{layer}.")}
        h = norm(x, p["attn_norm.weight"])
        q = rotate((h @ p["attn_q.weight"].T).reshape(length, HEADS, DIM))
        k = rotate((h @ p["attn_k.weight"].T).reshape(length, KV_HEADS, DIM))
        v = (h @ p["attn_v.weight"].T).reshape(length, KV_HEADS, DIM)
        mixed = np.empty_like(q)
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            score = q[:, head] @ k[:, shared].T / np.float32(np.sqrt(DIM))
            score[np.triu_indices(length, 1)] = -np.inf
            weight = np.exp(score - score.max(-1, keepdims=True))
            mixed[:, head] = weight / weight.sum(-1, keepdims=True) @ v[:, shared]
        x = x + mixed.reshape(length, -1) @ p["attn_output.weight"].T
        h = norm(x, p["ffn_norm.weight"])
        gate = h @ p["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ p["ffn_up.weight"].T)) @ p["ffn_down.weight"].T
    return norm(x, w["output_norm.weight"]) @ w["token_embd.weight"].T


@pytest.mark.parametrize("projection, name, heads", [("q_proj", "attn_q", HEADS), ("k_proj", "attn_k", KV_HEADS)])
def test_rows_of_a_head_are_taken_apart_from_pairs_to_halves(tensors, projection, name, heads):
    checkpoint = GGUFCheckpoint(CARD.weights_path)
    for layer in (0, LAYERS - 1):
        stored = tensors[f"blk.{layer}.{name}.weight"]
        for head in range(heads):
            rows = stored[head * DIM : (head + 1) * DIM]
            expected = np.concatenate([rows[0::2], rows[1::2]])
            read = dequantize(checkpoint.read(f"model.layers.{layer}.self_attn.{projection}.weight"))
            np.testing.assert_array_equal(read[head * DIM : (head + 1) * DIM], expected)


def test_log_probabilities_are_those_of_an_independent_forward_pass(one_device, tensors):
    """The 24 likeliest tokens of each position and 8 more: their logits, and the sum over the whole vocabulary."""
    tokens = one_device.tokenizer.encode(PROMPT + " Paris. It was 12 degrees there, so she wrote:")
    logits = forward(tensors, tokens).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    likeliest = np.argsort(-logits, axis=-1)[:, :24]
    others = np.random.default_rng(0).integers(0, logits.shape[1], (len(tokens), 8))
    ids = np.concatenate([likeliest, others], axis=1)
    np.testing.assert_allclose(
        log_probabilities(one_device, tokens, ids), np.take_along_axis(expected, ids, axis=1), atol=1e-3
    )


def test_a_plain_prompt_continues_as_it_should(one_device):
    text = "".join(event.text for event in one_device.generate([PROMPT], Sampling(max_new_tokens=2)))
    assert text == " Paris."


@pytest.mark.parametrize("mesh", ["2x1", "4x2", "5x3"])
def test_the_same_greedy_tokens_on_any_mesh(one_device, mesh):
    def tokens(machine):
        return [t for event in machine.generate([PROMPT], Sampling(max_new_tokens=24)) for t in event.tokens]

    expected = tokens(one_device)
    assert len(expected) == 24
    assert tokens(engine(mesh)) == expected


@pytest.mark.skipif(not TEXT.is_file(), reason=f"{TEXT.name} is not beside the checkout")
def test_the_likelihood_of_wikitext(tensors):
    """Mean NLL of 512 tokens, here and by the independent forward pass."""
    machine = engine(max_context=512, prefill_chunk=256)
    tokens = machine.tokenizer.encode(TEXT.read_text(encoding="utf-8"))[:512]
    logits = forward(tensors, tokens)[:-1].astype(np.float64)
    expected = np.mean(np.log(np.exp(logits).sum(-1)) - logits[np.arange(511), tokens[1:]])
    assert expected == pytest.approx(3.084, abs=0.002)
    assert -np.mean(machine.score(tokens), dtype=np.float64) == pytest.approx(expected, abs=0.0005)
