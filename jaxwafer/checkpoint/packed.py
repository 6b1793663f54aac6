"""Matrices that a hub folder stores as several tensors: which they are, and their parts in the layout of `quant`.

Nothing is requantised; most parts are the file's bytes as they are mapped.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import einops
import ml_dtypes
import numpy as np

from jaxwafer.checkpoint.quantization import Quantization, Scheme
from jaxwafer.checkpoint.safetensors import StoredTensor
from jaxwafer.errors import UserError
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.convert import unpack
from jaxwafer.quant.formats import Format

# dtype in a header → what scales are read as
SCALES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F8_E8M0": "float8_e8m0fnu"}
# Tensors that say how activations or the KV cache are to be quantised, or that columns are permuted.
REFUSED = (".input_scale", ".input_zero_point", ".weight_g_idx", ".k_scale", ".v_scale")


@dataclass(frozen=True, kw_only=True)
class Packed:
    """One matrix. kind: as in `Scheme`. tensors: its tensors by the end of their names after that of the matrix."""

    name: str
    kind: str
    tensors: Mapping[str, StoredTensor]


def collect(tensors: dict[str, StoredTensor], where: Path) -> dict[str, Packed]:
    """Take the tensors of quantised matrices out of `tensors`: {name of the matrix: its tensors}."""
    for name in tensors:
        if name.endswith(REFUSED):
            raise UserError(f"{where}: tensor {name!r} is of a quantisation that is not supported")
    found = {}
    for name, tensor in tensors.items():
        for end, kind in (("_packed", {"I32": "int4", "U8": "mxfp4"}.get(tensor.dtype)), ("_blocks", "mxfp4")):
            if name.endswith(end) and kind:
                found[name.removesuffix(end)] = kind, end
        if kind := {"F8_E4M3": "fp8", "I8": "int8"}.get(tensor.dtype):
            found[name] = kind, ""
    ends = {
        "int4": ("_packed", "_scale", "_shape", "_zero_point"),
        "mxfp4": ("_packed", "_scale", "_shape", "_blocks", "_scales"),
        "fp8": ("", "_scale", "_scale_inv"),
        "int8": ("", "_scale"),
    }
    return {
        name: Packed(
            name=name, kind=kind, tensors={e: tensors.pop(name + e) for e in ends[kind] if name + e in tensors}
        )
        for name, (kind, _) in found.items()
    }


class PackedReader:
    """Reads `Packed` matrices of the folder `where` by its config's quantisation, None where it has none."""

    def __init__(self, quantization: Quantization | None, where: Path):
        self.quantization, self.where = quantization, where

    def shape(self, packed: Packed) -> tuple[int, ...]:
        """Of the matrix: […, outputs, inputs]."""
        if packed.kind in ("fp8", "int8"):
            return packed.tensors[""].shape
        end = "_blocks" if "_blocks" in packed.tensors else "_packed"
        held = packed.tensors[end].shape
        if len(held) < (3 if end == "_blocks" else 2):
            raise self._wrong(packed, end, "of more axes")
        if end == "_blocks":
            return (*held[:-2], 2 * held[-2] * held[-1])
        if packed.kind == "mxfp4":
            return (*held[:-1], 2 * held[-1])
        shape = self._part(packed, "_shape")
        if (shape.dtype, shape.shape) != ("I64", (2,)):
            raise self._wrong(packed, "_shape", "two I64 numbers")
        outputs, inputs = shape.read(np.dtype(np.int64)).tolist()
        if (outputs, -(-inputs // 8)) != held:
            raise self._wrong(
                packed, "_packed", f"the {outputs} x {inputs} matrix that {packed.name + '_shape'!r} says"
            )
        return outputs, inputs

    def stored(self, packed: Packed) -> Format:
        scheme = self._scheme(packed)
        if packed.kind != "int4":
            return scheme.format("float32")
        scale = self._part(packed, "_scale")
        if scale.dtype not in ("F32", "BF16", "F16"):
            raise self._wrong(packed, "_scale", "of floating-point numbers")
        return scheme.format(SCALES[scale.dtype])

    def read(self, packed: Packed) -> QuantizedArray:
        return {"int4": self._int4, "mxfp4": self._mxfp4, "fp8": self._eight, "int8": self._eight}[packed.kind](packed)

    def _int4(self, packed: Packed) -> QuantizedArray:
        """compressed-tensors: element i of a row is in bits 4·(i mod 8) of a word, so the words' bytes, which are
        little-endian, hold two neighbours each, the even one low."""
        form, (outputs, inputs) = self.stored(packed), self.shape(packed)
        values = packed.tensors["_packed"].read(np.dtype(np.uint8), (outputs, -(-inputs // 8) * 4))
        values = _pad(values, form.row_bytes(inputs), 0x88)
        groups = form.groups(inputs)
        scale = self._expect(packed, "_scale", (outputs, groups)).read(form.scale_numpy)
        zero = None
        if form.zero:
            stored = self._expect(packed, "_zero_point", (-(-outputs // 8), groups), "I32")
            nibbles = unpack(stored.read(np.dtype(np.uint8), (*stored.shape, 4)))
            # Packed along the outputs.
            zero = np.ascontiguousarray(einops.rearrange(nibbles, "n groups eight -> (n eight) groups")[:outputs])
        return QuantizedArray(values, scale, None, zero, format=form)

    def _mxfp4(self, packed: Packed) -> QuantizedArray:
        """gpt-oss: blocks […, N, K/32, 16] and scales […, N, K/32]; compressed-tensors: [N, K/2] and [N, K/32]."""
        form, shape = self.stored(packed), self.shape(packed)
        values, scales = ("_blocks", "_scales") if "_blocks" in packed.tensors else ("_packed", "_scale")
        *outer, inputs = shape
        stored = packed.tensors[values]
        if stored.dtype != "U8" or inputs % 32 or (values == "_blocks" and stored.shape[-1] != 16):
            raise self._wrong(packed, values, "bytes of whole blocks of 32 inputs")
        scale = self._expect(packed, scales, (*outer, inputs // 32), "U8", "F8_E8M0")
        return QuantizedArray(
            stored.read(np.dtype(np.uint8), (*outer, inputs // 2)), scale.read(form.scale_numpy), None, format=form
        )

    def _eight(self, packed: Packed) -> QuantizedArray:
        """e4m3 or 8-bit integers; a scale of a block of outputs is repeated for each of them."""
        form, scheme, tensor = self.stored(packed), self._scheme(packed), packed.tensors[""]
        if len(tensor.shape) != 2:
            raise self._wrong(packed, "", "a matrix")
        outputs, inputs = tensor.shape
        end = "_scale_inv" if "_scale_inv" in packed.tensors else "_scale"
        scale = self._part(packed, end)
        if scale.dtype not in SCALES:
            raise self._wrong(packed, end, "of floating-point numbers")
        rows = max(outputs, 1) if scheme.rows is None else scheme.rows
        shape = -(-outputs // rows), form.groups(inputs)
        # One scale a tensor or an output is also written without the axis of one.
        allowed = {shape} | ({(shape[0],)} if shape[1] == 1 else set()) | ({()} if shape == (1, 1) else set())
        if scale.shape not in allowed:
            raise self._wrong(packed, end, f"of shape {list(shape)} for {list(tensor.shape)}, as the config has it")
        wide = scale.read(np.dtype(getattr(ml_dtypes, SCALES[scale.dtype], SCALES[scale.dtype])), shape)
        if form.scale == "float16" and scale.dtype != "F16":
            raise self._wrong(packed, end, "F16, which scales of groups of 8-bit integers are here")
        wide = np.repeat(wide.astype(form.scale_numpy), rows, axis=0)[:outputs]
        return QuantizedArray(_pad(tensor.read(form.numpy), form.row_bytes(inputs), 0), wide, None, format=form)

    def _scheme(self, packed: Packed) -> Scheme:
        module = packed.name.removesuffix(".weight")
        scheme = self.quantization and self.quantization.scheme(module)
        if scheme is None or scheme.kind != packed.kind:
            said = "says nothing of it" if scheme is None else f"has {scheme.kind} there"
            raise UserError(f"{self.where}: {packed.name!r} is stored as {packed.kind}, but the config {said}")
        return scheme

    def _part(self, packed: Packed, end: str) -> StoredTensor:
        if end not in packed.tensors:
            raise UserError(f"{self.where}: tensor {packed.name!r} is {packed.kind} without {packed.name + end!r}")
        return packed.tensors[end]

    def _expect(self, packed: Packed, end: str, shape: tuple[int, ...], *dtypes: str) -> StoredTensor:
        tensor = self._part(packed, end)
        if tensor.shape != shape or (dtypes and tensor.dtype not in dtypes):
            raise self._wrong(packed, end, f"{' or '.join(dtypes)} {list(shape)}".strip())
        return tensor

    def _wrong(self, packed: Packed, end: str, wanted: str) -> UserError:
        tensor = packed.tensors[end]
        return UserError(
            f"{self.where}: tensor {packed.name + end!r} is {tensor.dtype} {list(tensor.shape)}, but should be {wanted}"
        )


def _pad(array: np.ndarray, width: int, fill: int) -> np.ndarray:
    """Whole groups: columns of `fill` up to `width`, which inputs of zero will meet."""
    missing = width - array.shape[-1]
    if not missing:
        return array
    tail = np.full((*array.shape[:-1], missing), fill, np.uint8).view(array.dtype)
    return np.concatenate([array, tail], axis=-1)
