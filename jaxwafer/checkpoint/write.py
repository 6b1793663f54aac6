"""Checkpoints written in the hub's layout: sharded safetensors with an index, config.json and tokenizer files."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import safetensors.numpy

from jaxwafer.checkpoint.gguf import GGUFCheckpoint
from jaxwafer.checkpoint.hub import INDEX, SINGLE
from jaxwafer.checkpoint.load import read_matrix
from jaxwafer.checkpoint.packing import pack_matrix, quantization_config
from jaxwafer.checkpoint.source import Checkpoint
from jaxwafer.checkpoint.tokenizer import Tokenizer
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.model.declare import Weight
from jaxwafer.model.spec import ModelSpec
from jaxwafer.partition.placement import hub_name
from jaxwafer.quant.convert import convert
from jaxwafer.quant.formats import Format, choose

SHARD_BYTES = 2 * 10**9
TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tiktoken.model", "chat_template.jinja", "generation_config.json",
    "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
)  # fmt: skip


def write_checkpoint(source: Checkpoint, out: Path, policy: str = "native", *, shard_bytes: int = SHARD_BYTES,
                     progress: Callable[[int, int], None] = lambda done, total: None) -> int:  # fmt: skip
    """Write the tensors that the model's layers declare, in the formats of a weight policy; the bytes of them.

    The folder `out` appears whole or not at all, and must not be there. What the policy asks for is made as the loader
    would make it, so that the folder loads to the same arrays on any mesh. progress: (tensors done, in all). The host
    holds the tensors of one shard.
    """
    spec = spec_from_config(source.config)
    weights = dict(hub_tensors(spec))
    stored = {name: _format(source, name, weight, policy) for name, weight in weights.items()}
    config = quantization_config({n: f for n, f in stored.items() if weights[n].matrix})
    out = Path(os.path.abspath(out))
    if out.exists():
        raise UserError(f"{out} is already there: name a folder that is not")
    try:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
            folder = Path(scratch) / "whole"
            folder.mkdir()
            total = _write_shards(folder, _tensors(source, weights, stored, progress), shard_bytes)
            fields = source.config | ({"quantization_config": config} if config else {})
            _write_json(folder / "config.json", fields)
            _write_tokenizer(folder, source)
            folder.rename(out)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror or error}") from None
    return total


def hub_tensors(spec: ModelSpec) -> Iterator[tuple[str, Weight]]:
    """(hub name, a weight that is in it) for every tensor of a model; several weights may share one."""
    seen = set()
    parts = [(None, spec.globals())]
    for number, layer in enumerate(spec.layers):
        parts += [(number, part.weights()) for part in (layer.mixer, layer.mlp, spec.residual) if part]
    for layer, weights in parts:
        for weight in weights:
            name = hub_name(weight, layer)
            for expert in range(weight.shape[0] if weight.per_expert else 1):
                own = name.replace("{expert}", str(expert))
                if own not in seen:
                    seen.add(own)
                    yield own, weight


def _format(source: Checkpoint, name: str, weight: Weight, policy: str) -> Format:
    stored = source.stored(name)
    # Vectors stay as they are: the loader makes float32 of them in any case.
    return choose(policy, weight.role, stored) if weight.matrix else stored


def _tensors(source, weights, stored, progress) -> Iterator[tuple[str, np.ndarray]]:
    for done, (name, weight) in enumerate(weights.items()):
        progress(done, len(weights))
        if not weight.matrix:
            yield name, np.asarray(source.read(name).values)
            continue
        array = read_matrix(source, weight, name)
        inputs = weight.hub_shape[-1]
        array = convert(array, stored[name], inputs)
        if weight.transposed and array.format.scale is None:
            array = array.replace(values=np.swapaxes(array.values, -1, -2))
        yield from pack_matrix(name, array, inputs).items()


def _write_shards(folder: Path, tensors: Iterator[tuple[str, np.ndarray]], shard_bytes: int) -> int:
    """One file, or as many as there are with at most `shard_bytes` each (but at least one tensor) and their index."""
    shards: list[list[str]] = []
    held: dict[str, np.ndarray] = {}
    total = size = 0

    def write() -> None:
        safetensors.numpy.save_file(held, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        shards.append(list(held))

    for name, array in tensors:
        if held and size + array.nbytes > shard_bytes:
            write()
            held, size = {}, 0
        held[name] = np.ascontiguousarray(array)
        total, size = total + array.nbytes, size + array.nbytes
    write()
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    names = [SINGLE] if len(shards) == 1 else names
    for number, name in enumerate(names):
        (folder / f"{number}.safetensors").rename(folder / name)
    if len(shards) > 1:
        where = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": where})
    return total


def _write_tokenizer(folder: Path, source: Checkpoint) -> None:
    """A folder's own files; for a GGUF file, those that say the same."""
    if not isinstance(source, GGUFCheckpoint):
        for name in TOKENIZER_FILES:
            if (source.path / name).is_file():
                shutil.copyfile(source.path / name, folder / name)
        return
    tokenizer: Tokenizer = source.tokenizer()
    tokenizer.inner.save(str(folder / "tokenizer.json"))
    token = tokenizer.inner.id_to_token
    settings = {"add_bos_token": tokenizer.add_bos, "tokenizer_class": "PreTrainedTokenizerFast"}
    if tokenizer.bos_id is not None:
        settings["bos_token"] = token(tokenizer.bos_id)
    if tokenizer.eos_ids:
        settings["eos_token"] = token(tokenizer.eos_ids[0])
    if tokenizer.chat_template is not None:
        settings["chat_template"] = tokenizer.chat_template
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "generation_config.json", {"eos_token_id": list(tokenizer.eos_ids)})


def _write_json(path: Path, fields: dict) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")
