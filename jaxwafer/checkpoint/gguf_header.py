"""The GGUF container: its header, checked against the size of the file, as metadata and tensor positions.

The `gguf` library takes seconds over the tokenizer's arrays and trusts what it reads, so the header is parsed here.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxwafer.checkpoint.files import map_file
from jaxwafer.errors import UserError

VERSIONS = (2, 3)
STRING, ARRAY = 8, 9
# number of a metadata type → struct code
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
MAX_DIMENSIONS = 4
# least bytes of a metadata entry (key length, type, value) and of a tensor entry (name length, rank, type, offset)
ENTRY_BYTES, TENSOR_BYTES = 13, 24


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """How GGUF stores a tensor: `bytes` for each `elements` along a row. format: the name in `quant.formats`."""

    name: str
    elements: int
    bytes: int
    format: str


BLOCK_TYPES = {
    0: BlockType(name="F32", elements=1, bytes=4, format="f32"),
    1: BlockType(name="F16", elements=1, bytes=2, format="f16"),
    2: BlockType(name="Q4_0", elements=32, bytes=18, format="int4"),
    3: BlockType(name="Q4_1", elements=32, bytes=20, format="int4-min"),
    8: BlockType(name="Q8_0", elements=32, bytes=34, format="int8-g32"),
    30: BlockType(name="BF16", elements=1, bytes=2, format="bf16"),
}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor's place. shape: outermost axis first. start: byte in the file."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    start: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.elements * self.type.bytes

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=object)) * self.row_bytes


@dataclass(frozen=True, kw_only=True)
class GGUFHeader:
    """metadata: by key; arrays are lists of strings or NumPy arrays. tensors: by the name in the file."""

    data: mmap.mmap
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> GGUFHeader:
    """Map a GGUF file and parse its header; nothing that it claims may lie beyond the end of the file."""
    cursor = _Cursor(path, map_file(path))
    if cursor.take(4, "magic") != b"GGUF":
        raise UserError(f"{path} is not a GGUF file (it does not start with 'GGUF')")
    (version,) = cursor.unpack("I", "version")
    if version not in VERSIONS:
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        kind = f"big-endian version {swapped}" if swapped in VERSIONS else f"version {version}"
        raise UserError(f"{path}: GGUF {kind} is not supported (supported: little-endian versions 2 and 3)")
    tensors, entries = cursor.unpack("QQ", "counts")
    cursor.claim(entries * ENTRY_BYTES, f"{entries} metadata entries")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = cursor.string("a metadata key")
        if key in metadata:
            raise cursor.damaged(f"metadata key {key!r} is given twice")
        (kind,) = cursor.unpack("I", key)
        metadata[key] = cursor.value(kind, key)
    cursor.claim(tensors * TENSOR_BYTES, f"{tensors} tensors")
    infos = [cursor.tensor_info() for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1) or alignment > 1 << 20:
        raise cursor.damaged(f"general.alignment is {alignment!r}")
    base = -(-cursor.at // alignment) * alignment
    placed = {}
    for name, shape, block, offset in infos:
        info = TensorInfo(name=name, shape=shape, type=block, start=base + offset)
        if name in placed:
            raise cursor.damaged(f"tensor {name!r} is given twice")
        if offset % alignment:
            raise cursor.damaged(f"tensor {name!r} is not aligned to {alignment} bytes")
        if info.start + info.nbytes > len(cursor.data):
            end = info.start + info.nbytes
            raise cursor.damaged(f"tensor {name!r} ends at byte {end} of a file of {len(cursor.data)}")
        placed[name] = info
    return GGUFHeader(data=cursor.data, metadata=metadata, tensors=placed)


class _Cursor:
    """A position in the header; whatever would run past the end of the file is a UserError."""

    def __init__(self, path: Path, data: mmap.mmap):
        self.path, self.data, self.at = path, data, 0

    def damaged(self, what: str) -> UserError:
        return UserError(f"{self.path} is truncated or damaged: {what}; download it again")

    def claim(self, size: int, what: str) -> None:
        left = len(self.data) - self.at
        if size > left:
            raise self.damaged(f"the header promises {what} with {left} bytes left")

    def take(self, size: int, what: str) -> bytes:
        self.claim(size, what)
        self.at += size
        return self.data[self.at - size : self.at]

    def unpack(self, codes: str, what: str) -> tuple:
        layout = struct.Struct("<" + codes)
        return layout.unpack(self.take(layout.size, what))

    def string(self, what: str) -> str:
        return self.strings(1, what)[0]

    def strings(self, count: int, what: str) -> list[str]:
        # One loop without calls: a tokenizer has 100,000 of these.
        data, at, size, length = self.data, self.at, len(self.data), struct.Struct("<Q").unpack_from
        result = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length(data, at)[0]
                if at > size:
                    raise self.damaged(f"{what} runs past the end of the file")
                result.append(data[start:at].decode())
        except struct.error:
            raise self.damaged(f"{what} runs past the end of the file") from None
        except UnicodeDecodeError:
            raise self.damaged(f"{what} is not UTF-8") from None
        self.at = at
        return result

    def value(self, kind: int, key: str) -> Any:
        if kind in SCALARS:
            return self.unpack(SCALARS[kind], key)[0]
        if kind == STRING:
            return self.string(key)
        if kind != ARRAY:
            raise self.damaged(f"metadata {key!r} has the unknown type {kind}")
        element, count = self.unpack("IQ", key)
        if element == STRING:
            self.claim(count * 8, f"{count} strings in {key!r}")
            return self.strings(count, key)
        if element not in SCALARS:
            raise self.damaged(f"metadata {key!r} is an array of the unknown type {element}")
        dtype = np.dtype("<" + SCALARS[element])
        return np.frombuffer(self.take(count * dtype.itemsize, f"{count} values in {key!r}"), dtype)

    def tensor_info(self) -> tuple[str, tuple[int, ...], BlockType, int]:
        name = self.string("a tensor name")
        (rank,) = self.unpack("I", name)
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise self.damaged(f"tensor {name!r} has {rank} dimensions")
        shape = self.unpack("Q" * rank, name)[::-1]
        number, offset = self.unpack("IQ", name)
        if number not in BLOCK_TYPES:
            raise self._unsupported(name, number)
        block = BLOCK_TYPES[number]
        if 0 in shape or shape[-1] % block.elements:
            raise self.damaged(f"tensor {name!r} of shape {list(shape)} cannot be {block.name}")
        return name, shape, block, offset

    def _unsupported(self, name: str, number: int) -> UserError:
        from gguf import GGMLQuantizationType  # a slow import, for the name in a message

        try:
            known = GGMLQuantizationType(number).name
        except ValueError:
            return self.damaged(f"tensor {name!r} has the unknown type {number}")
        supported = ", ".join(b.name for b in BLOCK_TYPES.values())
        return UserError(f"{self.path}: tensor {name!r} is {known}, which is not supported (supported: {supported})")
