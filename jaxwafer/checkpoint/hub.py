"""Hugging Face folders: config.json and safetensors, in one file or in shards."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxwafer.checkpoint.files import map_file, parse_json, read_json, view
from jaxwafer.checkpoint.tokenizer import Tokenizer
from jaxwafer.checkpoint.tokenizer_files import tokenizer_from_hub
from jaxwafer.errors import UserError
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import FORMATS, Format

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# dtype in a header → its format here; the others are only measured, and refused when they are read.
FORMAT_OF = {"F32": FORMATS["f32"], "BF16": FORMATS["bf16"], "F16": FORMATS["f16"], "F8_E4M3": FORMATS["fp8"]}
ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
              "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}  # fmt: skip
MAX_HEADER, MAX_SIZE = 100_000_000, 1 << 48
SCALE = "_scale"


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor's place. data: its mapped file. start: byte in that file."""

    data: Any
    dtype: str
    shape: tuple[int, ...]
    start: int


class HubCheckpoint:
    """A `Checkpoint` (see `checkpoint.source`) in a Hugging Face folder, memory-mapped.

    Float32, bfloat16 and float16 tensors, and matrices in compressed-tensors `float-quantized` e4m3 with a scale per
    output (format fp8), which are one tensor here: their `weight_scale` is no name of its own. A damaged file, a
    missing shard or another quantisation is a UserError that names it.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        self.config = read_config(self.path)
        # A text model within a multimodal one has the names that it would have alone.
        tensors = {name.replace("language_model.", "", 1): tensor for name, tensor in _tensors(self.path).items()}
        scaled = {name + SCALE for name, tensor in tensors.items() if tensor.dtype == "F8_E4M3"}
        self._scales = {name: tensors.pop(name) for name in scaled & tensors.keys()}
        self._tensors = tensors

    def names(self) -> Iterator[str]:
        return iter(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensor(name).shape

    def stored(self, name: str) -> Format:
        dtype = self._tensor(name).dtype
        if dtype not in FORMAT_OF:
            raise UserError(f"{self.path}: tensor {name!r} is {dtype}, not one of {', '.join(FORMAT_OF)}")
        return FORMAT_OF[dtype]

    def read(self, name: str) -> QuantizedArray:
        form, tensor = self.stored(name), self._tensor(name)
        scale = None if form.scale is None else self._scale(name, tensor)
        return QuantizedArray(view(tensor.data, form.numpy, tensor.start, tensor.shape), scale, None, format=form)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_hub(self.path)

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise UserError(f"{self.path} has no tensor {name!r}")
        return self._tensors[name]

    def _scale(self, name: str, tensor: StoredTensor) -> np.ndarray:
        """float32 [N, 1]."""
        scale = self._scales.get(name + SCALE)
        if scale is None:
            raise UserError(f"{self.path}: tensor {name!r} is F8_E4M3 without {name + SCALE!r}")
        if len(tensor.shape) != 2 or scale.shape != (tensor.shape[0], 1) or scale.dtype not in ("F32", "BF16", "F16"):
            raise UserError(
                f"{self.path}: {name + SCALE!r} is {scale.dtype} {list(scale.shape)} for {list(tensor.shape)}; "
                "only one floating-point scale per output is supported"
            )
        return view(scale.data, FORMAT_OF[scale.dtype].numpy, scale.start, scale.shape).astype(np.float32)


def read_config(path: Path) -> dict:
    """The fields of config.json in a folder (or of the file itself), without a quantisation that is understood."""
    if not path.exists():
        raise UserError(f"there is no {path}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json; give the folder of a Hugging Face checkpoint")
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file)
    quantization = config.pop("quantization_config", None)
    if quantization is not None:
        _check_quantization(quantization, file)
    return config


def _check_quantization(fields: Any, file: Path) -> None:
    """Refuse all but e4m3 weights with one scale per output. Activations, not quantised here, may be so dynamically."""
    method, form = (fields.get(k) if isinstance(fields, dict) else None for k in ("quant_method", "format"))
    named = f"{file}: quantization_config {method!r} {form!r}"
    if (method, form) != ("compressed-tensors", "float-quantized"):
        raise UserError(f"{named} is not supported (supported: 'compressed-tensors' 'float-quantized' per channel)")
    groups = fields.get("config_groups")
    for group in groups.values() if groups and isinstance(groups, dict) else [None]:
        weights = group.get("weights") if isinstance(group, dict) else None
        wanted = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
        if not isinstance(weights, dict) or any(weights.get(k) != v for k, v in wanted.items()):
            raise UserError(f"{named} is supported only with weights {wanted}")
        inputs = group.get("input_activations")
        if inputs is not None and not (isinstance(inputs, dict) and inputs.get("dynamic") is True):
            raise UserError(f"{named} with static input_activations is not supported")
    if fields.get("kv_cache_scheme") is not None:
        raise UserError(f"{named} with a kv_cache_scheme is not supported")


def _tensors(folder: Path) -> dict[str, StoredTensor]:
    if (folder / SINGLE).is_file():
        return read_safetensors(folder / SINGLE)
    index = folder / INDEX
    if not index.is_file():
        raise UserError(f"{folder} has neither {SINGLE} nor {INDEX}")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise UserError(f"{index}: 'weight_map' should map tensor names to files; download it again")
    shards = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or not (folder / shard).is_file():
            raise UserError(f"{index} names {shard!r}, which is not in {folder}; download it")
        shards[shard] = read_safetensors(folder / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard]:
            raise UserError(f"{index} places {name!r} in {shard}, which does not hold it; download both again")
    return {name: shards[shard][name] for name, shard in weight_map.items()}


def read_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Map a safetensors file and parse its header: its tensors must fill the file exactly, without overlap."""
    data = map_file(path)
    if len(data) < 8:
        raise _damaged(path, f"it has only {len(data)} bytes")
    (length,) = struct.unpack_from("<Q", data)
    if length > min(MAX_HEADER, len(data) - 8):
        raise _damaged(path, f"its header of {length} bytes lies beyond the end of the file")
    try:
        text = data[8 : 8 + length].decode("utf-8")
    except UnicodeDecodeError:
        raise _damaged(path, "its header is not UTF-8") from None
    header = parse_json(text, f"the header of {path}")
    header.pop("__metadata__", None)
    tensors, ends = {}, []
    for name, entry in header.items():
        dtype, shape, (begin, end) = _entry(path, name, entry)
        tensors[name] = StoredTensor(data=data, dtype=dtype, shape=shape, start=8 + length + begin)
        ends.append((begin, end, name))
    at = 0
    for begin, end, name in sorted(ends):
        if begin != at:
            raise _damaged(path, f"tensor {name!r} begins at byte {begin} of the data, not at {at}")
        at = end
    held = len(data) - 8 - length
    if at != held:
        raise _damaged(path, f"its header promises {at} bytes of tensors and it holds {held}")
    return tensors


def _entry(path: Path, name: str, entry: Any) -> tuple[str, tuple[int, ...], list[int]]:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape, offsets = (fields.get(k) for k in ("dtype", "shape", "data_offsets"))
    lists = isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2 and len(shape) <= 64
    if not lists or not all(type(i) is int and 0 <= i < MAX_SIZE for i in (*shape, *offsets)):
        raise _damaged(path, f"tensor {name!r} has no proper shape and data_offsets")
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise UserError(f"{path}: tensor {name!r} has the unknown dtype {dtype!r:.60}")
    size = ITEM_BYTES[dtype]
    for n in shape:
        size *= n
    if offsets[1] - offsets[0] != size:
        raise _damaged(path, f"tensor {name!r} of {dtype} {shape} takes {size} bytes, not {offsets[1] - offsets[0]}")
    return dtype, tuple(shape), offsets


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is truncated or damaged: {what}; download it again")
