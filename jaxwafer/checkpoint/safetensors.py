"""The safetensors file format: a JSON header, then the bytes of each tensor."""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxwafer.checkpoint.files import map_file, parse_json, view
from jaxwafer.errors import UserError

ITEM_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2,
              "BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}  # fmt: skip
MAX_HEADER, MAX_SIZE = 100_000_000, 1 << 48


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor's place. data: its mapped file. start: byte in that file."""

    data: Any
    dtype: str
    shape: tuple[int, ...]
    start: int

    def read(self, dtype: np.dtype, shape: tuple[int, ...] | None = None) -> np.ndarray:
        """Its bytes as `dtype`, in `shape` (by default its own); nothing else of the file is touched."""
        count = math.prod(self.shape) * ITEM_BYTES[self.dtype] // dtype.itemsize
        return view(self.data, dtype, self.start, (count,)).reshape(self.shape if shape is None else shape)


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
