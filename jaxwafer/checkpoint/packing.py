"""The other way round from `checkpoint.packed`: matrices as the tensors that published layouts have for them, and the
`quantization_config` that says so."""

import re
from collections import defaultdict
from collections.abc import Iterable

import einops
import numpy as np

from jaxwafer.errors import UserError
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.convert import pack
from jaxwafer.quant.formats import Format

COMPRESSED = "compressed-tensors"


def pack_matrix(name: str, array: QuantizedArray, inputs: int) -> dict[str, np.ndarray]:
    """The tensors of a matrix with `inputs` inputs (and of a vector), by their names. Nothing is rounded.

    Floats are one tensor. Others are as compressed-tensors has them: `pack-quantized` (4-bit integers),
    `mxfp4-pack-quantized`, `float-quantized` (e4m3) and `int-quantized` (8-bit integers); a stack of experts in MXFP4
    is as gpt-oss has it. What has no published layout is a UserError that names it.
    """
    form, values = array.format, np.asarray(array.values)
    if form.scale is None:
        return {name: values}
    if not name.endswith(".weight"):
        blocks = einops.rearrange(values, "... (g b) -> ... g b", b=16)
        return {f"{name}_blocks": blocks, f"{name}_scales": np.asarray(array.scale).view(np.uint8)}
    scale = np.asarray(array.scale)
    if form.name == "mxfp4":
        return {f"{name}_packed": values, f"{name}_scale": scale.view(np.uint8)}
    if form.dtype in ("float8_e4m3fn", "int8"):
        return {name: np.ascontiguousarray(values[:, :inputs]), f"{name}_scale": scale}
    if form.minimum:
        raise UserError(f"{name} is {form.name}, a scale and a minimum for 32 inputs, which has no published layout "
                        "outside GGUF: choose --weights int8, fp8, bf16 or f32")  # fmt: skip
    # Bytes of two neighbours, the even one low, are the bytes of little-endian words of eight.
    words = values[:, : -(-inputs // 8) * 4]
    tensors = {
        f"{name}_packed": np.ascontiguousarray(words).view("<i4"),
        f"{name}_scale": scale,
        f"{name}_shape": np.array([values.shape[0], inputs], np.int64),
    }
    if form.zero:
        zero = np.asarray(array.zero)
        padded = np.pad(zero, ((0, -len(zero) % 8), (0, 0)))
        eights = einops.rearrange(padded, "(n eight) g -> n g eight", eight=8)
        tensors[f"{name}_zero_point"] = np.ascontiguousarray(pack(eights)).view("<i4")[..., 0]
    return tensors


def quantization_config(stored: dict[str, Format]) -> dict | None:
    """From the format of every matrix, by its name; None where all are floats. What no published config can say is a
    UserError."""
    quantized = {name: form for name, form in stored.items() if form.scale is not None}
    if not quantized:
        return None
    plain = _patterns(stored.keys() - quantized.keys(), stored)
    if stacked := [name for name in quantized if not name.endswith(".weight")]:
        if mixed := {form.name for form in quantized.values()} - {"mxfp4"}:
            raise UserError(
                f"{stacked[0]} holds a stack of experts: published layouts have such in mxfp4 with nothing else "
                f"quantised, and not with {min(mixed)}; choose --weights native, bf16 or f32"
            )
        return {"quant_method": "mxfp4", "modules_to_not_convert": plain}
    groups: dict[Format, list[str]] = defaultdict(list)
    for name, form in quantized.items():
        groups[form].append(name)
    config = {
        "quant_method": COMPRESSED,
        "format": "mixed-precision" if len({_layout(form) for form in groups}) > 1 else _layout(next(iter(groups))),
        "quantization_status": "compressed",
        "config_groups": {},
        "ignore": [f"re:{pattern}" for pattern in plain],
    }
    for number, (form, names) in enumerate(groups.items()):
        config["config_groups"][f"group_{number}"] = {
            "targets": [f"re:{pattern}" for pattern in _patterns(names, stored)],
            "weights": _weights(form),
            "input_activations": None,
            "output_activations": None,
            "format": _layout(form),
        }
    return config


def _layout(form: Format) -> str:
    kinds = {"uint4": "pack-quantized", "float4_e2m1fn": "mxfp4-pack-quantized", "float8_e4m3fn": "float-quantized"}
    return kinds.get(form.dtype, "int-quantized")


def _weights(form: Format) -> dict:
    float8 = form.dtype == "float8_e4m3fn"
    fields = {
        "num_bits": 4 if form.packed else 8,
        "type": "float" if float8 or form.name == "mxfp4" else "int",
        "symmetric": not form.zero,
        "strategy": "group" if form.group else "channel",
        "group_size": form.group,
        "dynamic": False,
    }
    if float8 and form.group:
        fields |= {"strategy": "block", "group_size": None, "block_structure": [1, form.group]}
    return fields


def _pattern(name: str) -> str:
    """A regular expression for a module and its like in other layers, and of other experts."""
    return re.sub(r"\\\.\d+(?=\\\.|$)", r"\\.\\d+", re.escape(name.removesuffix(".weight"))) + "$"


def _patterns(names: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """Regular expressions that mean the modules of `names` and none of the other `all_names`: one for all layers where
    they agree."""
    names = set(names)
    others = {_pattern(name) for name in all_names if name not in names}
    exact = (re.escape(name.removesuffix(".weight")) + "$" for name in names if _pattern(name) in others)
    return sorted({_pattern(name) for name in names} - others | set(exact))
