"""GGUF files of the Llama architecture, under hub names and in the layout of `quant.formats`."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import einops
import numpy as np

from jaxwafer.checkpoint.files import view
from jaxwafer.checkpoint.gguf_header import TensorInfo, read_header
from jaxwafer.checkpoint.tokenizer import Tokenizer
from jaxwafer.checkpoint.tokenizer_files import tokenizer_from_gguf
from jaxwafer.errors import UserError
from jaxwafer.model.rope import Rope, rope_from_config
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import FORMATS, Format

GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LAYER_TENSOR = re.compile(rf"blk\.(0|[1-9]\d{{0,5}})\.({'|'.join(LAYER_NAMES)})\.(weight|bias)")
ROPE_FACTORS = "rope_freqs.weight"
DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class GGUFCheckpoint:
    """A `Checkpoint` (see `checkpoint.source`) in one memory-mapped GGUF file.

    Blocks are repacked, never requantised: Q4_0 is format int4, Q4_1 int4-min, Q8_0 int8-g32. A damaged file, another
    architecture, or a tensor, type or metadata key that is not understood is a UserError that names it.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        header = read_header(self.path)
        self.metadata, self._data = header.metadata, header.data
        self._tensors: dict[str, TensorInfo] = {}
        factors = None
        for name, info in header.tensors.items():
            if name == ROPE_FACTORS:
                factors = self._vector(info)
            else:
                self._tensors[self._hub_name(name)] = info
        self.config = _Config(self.path, self.metadata, self._tensors).translate(factors)

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._info(name).shape

    def stored(self, name: str) -> Format:
        return FORMATS[self._info(name).type.format]

    def read(self, name: str) -> QuantizedArray:
        info = self._info(name)
        form = self.stored(name)
        if form.scale is None:
            array = QuantizedArray(view(self._data, form.numpy, info.start, info.shape), None, None, format=form)
        else:
            array = self._blocks(info, form)
        for projection, heads in (("q_proj", "num_attention_heads"), ("k_proj", "num_key_value_heads")):
            if f".{projection}." in name:
                return self._halves(array, info, self.config[heads])
        return array

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_gguf(self.metadata, self.path)

    def _info(self, name: str) -> TensorInfo:
        if name not in self._tensors:
            raise UserError(f"{self.path} has no tensor {name!r}")
        return self._tensors[name]

    def _hub_name(self, name: str) -> str:
        if name in GLOBAL_NAMES:
            return GLOBAL_NAMES[name]
        match = LAYER_TENSOR.fullmatch(name)
        if match is None:
            raise UserError(f"{self.path}: tensor {name!r} is not part of a Llama model as built here; refusing")
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{LAYER_NAMES[part]}.{kind}"

    def _vector(self, info: TensorInfo) -> np.ndarray:
        if info.type.name != "F32" or len(info.shape) != 1:
            raise UserError(f"{self.path}: tensor {info.name!r} should be an F32 vector")
        return view(self._data, np.dtype(np.float32), info.start, info.shape)

    def _blocks(self, info: TensorInfo, form: Format) -> QuantizedArray:
        if len(info.shape) != 2:
            raise UserError(f"{self.path}: tensor {info.name!r} is {info.type.name} but not a matrix; refusing")
        rows, groups = info.shape[0], info.shape[1] // info.type.elements
        block = view(self._data, np.dtype(np.uint8), info.start, (rows, groups, info.type.bytes))
        head = 4 if form.minimum else 2
        scales = np.ascontiguousarray(block[..., :head]).view(form.scale_numpy)
        stored = block[..., head:]
        if form.packed:
            # Byte i of a block holds elements i and i + 16; here a byte holds two neighbours.
            even, odd = stored[..., 0::2], stored[..., 1::2]
            stored = np.concatenate([(even & 0xF) | (odd << 4), (even >> 4) | (odd & 0xF0)], axis=-1)
        values = einops.rearrange(np.ascontiguousarray(stored), "n g k -> n (g k)").view(form.numpy)
        scale = np.ascontiguousarray(scales[..., 0])
        minimum = np.ascontiguousarray(scales[..., 1]) if form.minimum else None
        return QuantizedArray(values, scale, minimum, format=form)

    def _halves(self, array: QuantizedArray, info: TensorInfo, heads: int) -> QuantizedArray:
        """Rows of query and key heads, from RoPE's pairs side by side (GGUF) to the halves of a head (hub)."""
        if info.shape[0] % (2 * heads):
            raise UserError(f"{self.path}: {info.shape[0]} rows of {info.name!r} do not divide into {heads} heads")

        def permute(part):
            return None if part is None else einops.rearrange(part, "(h d two) ... -> (h two d) ...", h=heads, two=2)

        parts = [permute(p) for p in (array.values, array.scale, array.minimum)]
        return QuantizedArray(*parts, format=array.format)


class _Config:
    """GGUF metadata → the fields of a Hugging Face config.json. Every `llama.*` key must be understood."""

    def __init__(self, path: Path, metadata: dict[str, Any], tensors: dict[str, TensorInfo]):
        self.path, self.metadata, self.tensors = path, metadata, tensors
        self._left = {key for key in metadata if key.startswith("llama.")}

    def translate(self, rope_factors: np.ndarray | None) -> dict:
        architecture = self.metadata.get("general.architecture")
        # Types first: a damaged value may be an array, which does not compare to one truth value.
        if type(architecture) is not str or architecture != "llama":
            raise UserError(
                f"{self.path}: GGUF architecture {architecture!r:.60} is not supported (supported: 'llama')"
            )
        parts = self.metadata.get("split.count", 1)
        if type(parts) is not int or parts > 1:
            raise UserError(f"{self.path} is one of {parts!r:.60} parts; join them with llama-gguf-split --merge")
        hidden, heads = self._count("embedding_length"), self._count("attention.head_count")
        head_dim = self._count("attention.key_length", hidden // heads)
        theta = self._number("rope.freq_base", 10000.0)
        config = {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._count("attention.head_count_kv", heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self._number("attention.layer_norm_rms_epsilon"),
            "max_position_embeddings": self._count("context_length"),
            "rope_theta": theta,
            "rope_scaling": self._rope_scaling(rope_factors, theta, head_dim),
            "tie_word_embeddings": "lm_head.weight" not in self.tensors,
            "attention_bias": self._biased("self_attn"),
            "mlp_bias": self._biased("mlp"),
        }
        self._require("attention.value_length", head_dim)
        self._require("rope.dimension_count", head_dim)
        self._require("expert_count", 0)
        self._require("expert_used_count", 0)
        config["vocab_size"] = self._vocabulary()
        self._check_tensors(config)
        dtype = DTYPES.get(self.tensors["model.embed_tokens.weight"].type.name)
        if dtype:
            config["torch_dtype"] = dtype
        for name in ("bos_token_id", "eos_token_id"):
            if isinstance(self.metadata.get(f"tokenizer.ggml.{name}"), int):
                config[name] = self.metadata[f"tokenizer.ggml.{name}"]
        if self._left:
            raise UserError(f"{self.path}: metadata {min(self._left)!r} is not understood and may change the maths")
        return config

    def _take(self, name: str, default: Any) -> Any:
        key = f"llama.{name}"
        self._left.discard(key)
        value = self.metadata.get(key, default)
        if value is ...:
            raise UserError(f"{self.path} lacks the metadata {key!r}")
        return value

    def _count(self, name: str, default: Any = ...) -> int:
        value = self._take(name, default)
        if type(value) is not int or value <= 0:
            raise UserError(f"{self.path}: metadata 'llama.{name}' should be one positive integer, not {value!r:.60}")
        return value

    def _number(self, name: str, default: Any = ...) -> float:
        value = self._take(name, default)
        if type(value) is not float or not math.isfinite(value) or value <= 0:
            raise UserError(f"{self.path}: metadata 'llama.{name}' should be a positive number, not {value!r:.60}")
        # Stored as float32: the shortest decimal that gives it back is what config.json had (1e-05).
        return float(str(np.float32(value)))

    def _require(self, name: str, allowed: int) -> None:
        value = self._take(name, allowed)
        if type(value) is not int or value != allowed:
            raise UserError(f"{self.path}: metadata 'llama.{name}' = {value!r:.60} is not supported (only {allowed})")

    def _biased(self, part: str) -> bool:
        return any(f".{part}." in name and name.endswith(".bias") for name in self.tensors)

    def _vocabulary(self) -> int:
        embedding = self.tensors.get("model.embed_tokens.weight")
        if embedding is None:
            raise UserError(f"{self.path} has no tensor 'token_embd.weight'")
        self._require("vocab_size", embedding.shape[0])
        return embedding.shape[0]

    def _check_tensors(self, config: dict) -> None:
        """The sizes in the metadata must be those of the tensors: a damaged one may be in the billions."""
        layers = config["num_hidden_layers"]
        found = {int(name.split(".")[2]) for name in self.tensors if name.startswith("model.layers.")}
        if len(found) != layers or found != set(range(layers)):
            raise UserError(f"{self.path}: metadata promises {layers} layers, and {len(found)} have tensors")
        hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        queries = config["num_attention_heads"] * config["head_dim"]
        keys = config["num_key_value_heads"] * config["head_dim"]
        expected = {
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (mlp, hidden),
            "up_proj": (mlp, hidden),
            "down_proj": (hidden, mlp),
            "lm_head": (vocab, hidden),
            "embed_tokens": (vocab, hidden),
        }
        for name, info in self.tensors.items():
            part, kind = name.split(".")[-2:]
            shape = expected.get(part, (hidden,))
            shape = shape if kind == "weight" else shape[:1]
            if info.shape != shape:
                raise UserError(f"{self.path}: tensor {info.name!r} has shape {list(info.shape)}, not {list(shape)}")

    def _rope_scaling(self, factors: np.ndarray | None, theta: float, head_dim: int) -> dict | None:
        kind = self._take("rope.scaling.type", "none")
        if type(kind) is not str or kind != "none":
            raise UserError(f"{self.path}: metadata 'llama.rope.scaling.type' = {kind!r:.60} is not supported")
        if factors is None or np.all(factors == 1):
            return None
        # Only the divisors of the frequencies are stored. Every published Llama 3 model has these turns and this
        # context, and its factor is the largest divisor.
        scaling = {
            "rope_type": "llama3",
            "factor": float(factors.max()),
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        if factors.shape != (head_dim // 2,) or not np.all(factors >= 1):
            raise self._strange_rope()
        plain = Rope(theta=theta, dims=head_dim).frequencies()
        scaled = rope_from_config({"rope_theta": theta, "rope_scaling": scaling}, dims=head_dim).frequencies()
        if not np.allclose(plain / factors, scaled, rtol=1e-5, atol=0):
            raise self._strange_rope()
        return scaling

    def _strange_rope(self) -> UserError:
        return UserError(f"{self.path}: tensor {ROPE_FACTORS!r} is not the RoPE scaling of Llama 3; not supported")
