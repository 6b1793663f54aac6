"""Trained parameters as a folder in the hub's layout: int4 groups as compressed-tensors packs them, others bfloat16."""

import json
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import safetensors.numpy
import tokenizers

from jaxwafer.quant.convert import quantize
from jaxwafer.train import tasks
from jaxwafer.train.quantize import FORM, IGNORE, WIDE, quantized

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True,
                "dynamic": False, "actorder": None, "observer": "minmax",
            },
        },
    },
    "ignore": list(IGNORE),
    "kv_cache_scheme": None,
}  # fmt: skip


def export(params: dict, config: dict, folder: Path) -> None:
    """Write config.json, model.safetensors, the tokenizer and generation_config.json into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {}
    for name, array in hub_tensors(params):
        stored |= packed(name, array) if quantized(name) else {name: plain(name, array)}
    weights = folder / "model.safetensors"
    safetensors.numpy.save_file(stored, weights, metadata={"format": "pt"})
    weights.chmod(0o644)  # the library makes it readable for its owner alone
    write_json(folder / "config.json", config | {"quantization_config": QUANTIZATION})
    write_json(
        folder / "generation_config.json", {"do_sample": False, "eos_token_id": tasks.EOS, "pad_token_id": tasks.PAD}
    )
    write_tokenizer(folder)


def hub_tensors(params: dict) -> Iterator[tuple[str, np.ndarray]]:
    """(hub name, float32 array) of every tensor; stacks of experts are taken apart."""
    for module, weights in jax.device_get(params).items():
        entries = weights.items() if isinstance(weights, dict) else [("", weights)]
        for name, array in entries:
            full = f"{module}.{name}".rstrip(".")
            if "{expert}" in full:
                yield from ((full.format(expert=n), one) for n, one in enumerate(array))
            else:
                yield full, array


def packed(name: str, array: np.ndarray) -> dict[str, np.ndarray]:
    """compressed-tensors: eight numbers to an int32, the first lowest, so the words' bytes are those of `quant`."""
    parts, stem = quantize(array, FORM), name.removesuffix(".weight")
    return {
        f"{stem}.weight_packed": np.ascontiguousarray(parts.values).view(np.int32),
        f"{stem}.weight_scale": parts.scale,
        f"{stem}.weight_shape": np.array(array.shape, np.int64),
    }


def plain(name: str, array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array if name.endswith(WIDE) else array.astype(ml_dtypes.bfloat16))


def write_tokenizer(folder: Path) -> None:
    """Words that spaces separate, and nothing else."""
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(tasks.ID), unk_token=tasks.SPECIAL[tasks.UNKNOWN]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(list(tasks.SPECIAL))
    inner.save(str(folder / "tokenizer.json"))
    pad, eos, unknown = tasks.SPECIAL
    write_json(folder / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "pad_token": pad, "eos_token": eos, "unk_token": unknown,
        "add_bos_token": False, "clean_up_tokenization_spaces": False,
    })  # fmt: skip


def write_json(path: Path, fields: dict) -> None:
    path.write_text(json.dumps(fields, indent=2) + "\n")
