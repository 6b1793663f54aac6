"""Tiny checkpoints, written anew for each test."""

import gguf
import numpy as np
import pytest
import tokenizers

from jaxwafer.checkpoint.cards import card
from jaxwafer.errors import UserError

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP = 64, 4, 2, 32, 96
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vocabulary() -> tuple[list[str], list[str]]:
    """Tokens (special ones first, then bytes, then merges) and merges of a byte-level BPE."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    return SPECIAL + alphabet + [merge.replace(" ", "") for merge in merges], merges


def one_line(error: pytest.ExceptionInfo) -> str:
    """The message of a UserError, which is one line."""
    message = str(error.value)
    assert isinstance(error.value, UserError) and message and "\n" not in message
    return message


def llama_tensors(rng: np.random.Generator, vocab: int, layers: int = 1) -> dict[str, np.ndarray]:
    """float32 tensors of a tiny Llama under GGUF names."""
    shapes = {"token_embd.weight": (vocab, HIDDEN), "output_norm.weight": (HIDDEN,)}
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm.weight": (HIDDEN,),
            f"blk.{i}.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
            f"blk.{i}.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
            f"blk.{i}.ffn_norm.weight": (HIDDEN,),
            f"blk.{i}.ffn_gate.weight": (MLP, HIDDEN),
            f"blk.{i}.ffn_up.weight": (MLP, HIDDEN),
            f"blk.{i}.ffn_down.weight": (HIDDEN, MLP),
        }
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def write_gguf(tmp_path):
    """A function that writes a tiny Llama with the `gguf` library, and returns its path and its float32 tensors.

    kind: type of the matrices. edit(tensors): changes what is written. metadata: keys put over the usual ones, None
    to leave one out. Tensors in `types` have another type.
    """

    def write(kind="F32", *, edit=None, metadata=None, types=None, name="tiny.gguf", architecture="llama"):
        tokens, merges = vocabulary()
        tensors = llama_tensors(np.random.default_rng(0), len(tokens))
        if edit:
            edit(tensors)
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        fields = {
            "llama.block_count": 1,
            "llama.context_length": 128,
            "llama.embedding_length": HIDDEN,
            "llama.feed_forward_length": MLP,
            "llama.attention.head_count": HEADS,
            "llama.attention.head_count_kv": KV_HEADS,
            "llama.attention.key_length": HEAD_DIM,
            "llama.attention.value_length": HEAD_DIM,
            "llama.rope.dimension_count": HEAD_DIM,
            "llama.attention.layer_norm_rms_epsilon": 1e-5,
            "llama.rope.freq_base": 100000.0,
            "llama.vocab_size": len(tokens),
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
            "tokenizer.ggml.merges": merges,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": TEMPLATE,
        }
        for key, value in (fields | (metadata or {})).items():
            add = {int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool, str: writer.add_string,
                   list: writer.add_array}  # fmt: skip
            if value is not None:
                if key == "general.architecture":
                    del writer.kv_data[0][key]
                add[type(value)](key, value)
        for tensor, value in tensors.items():
            chosen = gguf.GGMLQuantizationType[(types or {}).get(tensor, kind if value.ndim > 1 else "F32")]
            if chosen.name in ("F32", "F16"):
                writer.add_tensor(tensor, value.astype({"F32": np.float32, "F16": np.float16}[chosen.name]))
            else:
                writer.add_tensor(tensor, gguf.quants.quantize(value, chosen), raw_dtype=chosen)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path, tensors

    return write


@pytest.fixture
def smollm2():
    """The path of the real SmolLM2-135M-Instruct, where it has been fetched."""
    found = card("smollm2-135m-instruct")
    if not found.ready:
        pytest.skip("SmolLM2-135M-Instruct is not in the user's cache (jaxwafer fetch smollm2-135m-instruct)")
    return found.weights_path
