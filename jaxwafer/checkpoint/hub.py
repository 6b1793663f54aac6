"""Hugging Face folders: config.json and safetensors, in one file or in shards."""

import warnings
from collections.abc import Iterator
from pathlib import Path

from jaxwafer.checkpoint.files import read_json
from jaxwafer.checkpoint.packed import PackedReader, collect
from jaxwafer.checkpoint.quantization import Quantization, read_quantization
from jaxwafer.checkpoint.safetensors import StoredTensor, read_safetensors
from jaxwafer.checkpoint.tokenizer import Tokenizer
from jaxwafer.checkpoint.tokenizer_files import tokenizer_from_hub
from jaxwafer.errors import UserError
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import FORMATS, Format

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# dtype in a header → its format here; the others are only measured, and refused when they are read.
FORMAT_OF = {"F32": FORMATS["f32"], "BF16": FORMATS["bf16"], "F16": FORMATS["f16"]}


class HubCheckpoint:
    """A `Checkpoint` (see `checkpoint.source`) in a Hugging Face folder, memory-mapped.

    Float32, bfloat16 and float16 tensors, and matrices that `checkpoint.packed` makes of several tensors, which are one
    tensor here. Which a matrix is, is decided by the tensors that there are: a config may name too much or too little.
    A damaged file, a missing shard or another quantisation is a UserError that names it.
    """

    def __init__(self, folder: str | Path):
        self.path = Path(folder)
        self.config, quantization = read_config(self.path)
        if quantization is not None and quantization.dynamic:
            warnings.warn(
                f"{self.path} was made for activations quantised as they come; here only its weights are quantised",
                stacklevel=2,
            )
        # A text model within a multimodal one has the names that it would have alone.
        tensors = {name.replace("language_model.", "", 1): tensor for name, tensor in _tensors(self.path).items()}
        self._packed = collect(tensors, self.path)
        self._tensors = tensors
        self._reader = PackedReader(quantization, self.path)

    def names(self) -> Iterator[str]:
        yield from self._tensors
        yield from self._packed

    def shape(self, name: str) -> tuple[int, ...]:
        return self._reader.shape(self._packed[name]) if name in self._packed else self._tensor(name).shape

    def stored(self, name: str) -> Format:
        if name in self._packed:
            return self._reader.stored(self._packed[name])
        dtype = self._tensor(name).dtype
        if dtype not in FORMAT_OF:
            raise UserError(f"{self.path}: tensor {name!r} is {dtype}, not one of {', '.join(FORMAT_OF)}")
        return FORMAT_OF[dtype]

    def read(self, name: str) -> QuantizedArray:
        if name in self._packed:
            return self._reader.read(self._packed[name])
        form = self.stored(name)
        return QuantizedArray(self._tensor(name).read(form.numpy), None, None, format=form)

    def tokenizer(self) -> Tokenizer:
        return tokenizer_from_hub(self.path)

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self._tensors:
            raise UserError(f"{self.path} has no tensor {name!r}")
        return self._tensors[name]


def read_config(path: Path) -> tuple[dict, Quantization | None]:
    """The fields of config.json in a folder (or of the file itself) but for its quantisation, and that."""
    if not path.exists():
        raise UserError(f"there is no {path}")
    if path.is_dir() and not (path / "config.json").is_file():
        raise UserError(f"{path} has no config.json; give the folder of a Hugging Face checkpoint")
    file = path / "config.json" if path.is_dir() else path
    config = read_json(file)
    found = config.pop("quantization_config", None)
    # Models that see as well as read have it with the language model.
    text = config.get("text_config")
    if isinstance(text, dict) and "quantization_config" in text:
        config["text_config"] = {k: v for k, v in text.items() if k != "quantization_config"}
        found = text["quantization_config"] if found is None else found
    return config, None if found is None else read_quantization(found, file)


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
