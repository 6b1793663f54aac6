"""Hugging Face folders for tests: a tokenizer of numbered words, and a checkpoint in memory written to disk."""

import json
from pathlib import Path

import safetensors.numpy
import tokenizers
from support import MemoryCheckpoint


def write_tokenizer(folder: Path, vocab: int) -> None:
    """tokenizer.json where "t7 t5" is tokens 7 and 5, and any other word is token 0."""
    words = {f"t{i}": i for i in range(vocab)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="t0"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(folder / "tokenizer.json"))


def write_checkpoint(folder: Path, source: MemoryCheckpoint) -> Path:
    """A checkpoint of float32 tensors as config.json, model.safetensors and tokenizer.json."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(source.config))
    safetensors.numpy.save_file(source.tensors, folder / "model.safetensors")
    write_tokenizer(folder, source.config.get("text_config", source.config)["vocab_size"])
    return folder
