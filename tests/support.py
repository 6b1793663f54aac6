"""A tiny Llama in memory, and the plain forward pass it is held against."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxwafer.engine import Engine
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.model.declare import Weight
from jaxwafer.model.rope import rope_from_config
from jaxwafer.options import Options
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.convert import dense, quantize
from jaxwafer.quant.formats import FORMATS, Format


def config(**changes) -> dict:
    """A Llama of 5 layers with 3 groups of 2 heads, small and of awkward sizes."""
    base = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 16, "intermediate_size": 80, "num_hidden_layers": 5, "vocab_size": 101, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False, "torch_dtype": "float32",
    }  # fmt: skip
    return base | changes


class Words:
    """A tokenizer whose token 7 is the text "<7>"."""

    bos_id, add_bos, chat_template = None, False, None

    def __init__(self, eos_ids: tuple[int, ...] = ()):
        self.eos_ids = eos_ids

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        return [int(part) for part in text.replace("<", " ").replace(">", " ").split()]

    def decode(self, ids) -> str:
        return "".join(f"<{i}>" for i in ids)

    def stream(self) -> "Words":
        return self

    def push(self, token: int) -> str:
        return f"<{token}>"

    def flush(self) -> str:
        return ""


@dataclass
class MemoryCheckpoint:
    """A checkpoint of arrays. `form` is the format that its matrices are stored in."""

    config: dict
    tensors: dict[str, np.ndarray]
    form: str = "f32"
    eos_ids: tuple[int, ...] = ()
    path: Path = Path("memory")
    reads: list[str] = field(default_factory=list)

    def names(self) -> Iterator[str]:
        yield from self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self.tensors:
            raise UserError(f"no tensor {name}")
        return self.tensors[name].shape

    def stored(self, name: str) -> Format:
        return FORMATS["f32" if len(self.shape(name)) == 1 else self.form]

    def read(self, name: str) -> QuantizedArray:
        self.reads.append(name)
        tensor = self.tensors[name]
        return dense(tensor) if tensor.ndim == 1 else quantize(tensor, FORMATS[self.form])

    def tokenizer(self) -> Words:
        return Words(self.eos_ids)


def checkpoint(seed: int = 0, form: str = "f32", eos_ids: tuple[int, ...] = (), **changes) -> MemoryCheckpoint:
    """A tiny Llama with random weights, large enough that greedy tokens vary and margins are far above rounding."""
    return random_checkpoint(config(**changes), seed, form, eos_ids)


def random_checkpoint(fields: dict, seed: int = 0, form: str = "f32",
                      eos_ids: tuple[int, ...] = ()) -> MemoryCheckpoint:  # fmt: skip
    """The same for the config of any family."""
    spec, rng = spec_from_config(fields), np.random.default_rng(seed)
    tensors = {}

    def add(name: str, shape: tuple[int, ...]) -> None:
        if name in tensors:  # which several weights are parts of
            return
        if len(shape) == 1:
            tensors[name] = (1 + 0.1 * rng.standard_normal(shape)).astype(np.float32)
        else:
            tensors[name] = (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def hub_shape(weight: Weight) -> tuple[int, ...]:
        *outer, outputs, inputs = shape = 1, *weight.hub_shape
        return tuple((*outer, inputs, outputs) if weight.transposed and not FORMATS[form].scale else shape)[1:]

    for weight in spec.globals():
        add(weight.hub, weight.shape)
    for number, layer in enumerate(spec.layers):
        for part in (layer.mixer, layer.mlp, spec.residual):
            for weight in part.weights() if part else ():
                for expert in range(weight.shape[0] if weight.per_expert else 1):
                    add(f"model.layers.{number}.{weight.hub.replace('{expert}', str(expert))}", hub_shape(weight))
    return MemoryCheckpoint(fields, tensors, form=form, eos_ids=eos_ids)


def engine(source: MemoryCheckpoint | None = None, partition=None, **options) -> Engine:
    """An engine in float32 throughout unless told otherwise."""
    defaults = {
        "dtype": "f32",
        "kv_cache": "f32",
        "activations": "float",
        "max_context": 128,
        "block": 8,
        "prefill_chunk": 64,
        "burst": 4,
    }
    return Engine(source or checkpoint(), Options(**(defaults | options)), partition=partition)


def forward(source: MemoryCheckpoint, tokens: list[int]) -> np.ndarray:
    """Logits of every position, float64 [T, vocabulary]: the textbook, with nothing shared with the code under test but
    the checkpoint and the RoPE frequencies."""
    fields, w = source.config, {k: v.astype(np.float64) for k, v in source.tensors.items()}
    heads, kv_heads, dim = (fields[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    eps, length = fields["rms_norm_eps"], len(tokens)
    angle = np.arange(length)[:, None] * rope_from_config(fields, dims=dim).frequencies().astype(np.float64)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def norm(x, weight):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight

    def rotate(x):
        low, high = np.split(x, 2, -1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for layer in range(fields["num_hidden_layers"]):
        p = {k.split(f"layers.{layer}.")[1]: v for k, v in w.items() if f"layers.{layer}." in k}
        h = norm(x, p["input_layernorm.weight"])
        q = rotate((h @ p["self_attn.q_proj.weight"].T).reshape(length, heads, dim))
        k = rotate((h @ p["self_attn.k_proj.weight"].T).reshape(length, kv_heads, dim))
        v = (h @ p["self_attn.v_proj.weight"].T).reshape(length, kv_heads, dim)
        k, v = (np.repeat(a, heads // kv_heads, 1) for a in (k, v))
        score = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(dim)
        score = np.where(np.tri(length, dtype=bool), score, -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        weight /= weight.sum(-1, keepdims=True)
        x = x + np.einsum("hqk,khd->qhd", weight, v).reshape(length, -1) @ p["self_attn.o_proj.weight"].T
        h = norm(x, p["post_attention_layernorm.weight"])
        gate = h @ p["mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ p["mlp.up_proj.weight"].T)) @ p["mlp.down_proj.weight"].T
    head = w["model.embed_tokens.weight"] if fields["tie_word_embeddings"] else w["lm_head.weight"]
    return norm(x, w["model.norm.weight"]) @ head.T


def greedy(source: MemoryCheckpoint, prompt: list[int], count: int) -> list[int]:
    """The `count` greedy tokens after a prompt, by `forward`."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(np.argmax(forward(source, tokens)[-1])))
    return tokens[len(prompt) :]
