"""Reading files so that whatever is wrong with one becomes a clear message."""

import json
import mmap
from pathlib import Path

import numpy as np

from jaxwafer.errors import UserError


def map_file(path: Path) -> mmap.mmap:
    """The whole file, mapped read-only; a file that cannot be read, or is empty, is a UserError."""
    try:
        with open(path, "rb") as file:
            if file.seek(0, 2) == 0:
                raise UserError(f"{path} is empty; download it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def read_text(path: Path) -> str:
    """The text of a UTF-8 file."""
    try:
        return path.read_bytes().decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text; download it again") from None


def read_json(path: Path) -> dict:
    """The object in a JSON file."""
    return parse_json(read_text(path), str(path))


def parse_json(text: str, where: str) -> dict:
    """The object that `text` holds; no key may be given twice. `where` names the text in messages."""
    try:
        value = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not valid JSON ({error}); download it again") from None
    if not isinstance(value, dict):
        raise UserError(f"{where} should hold a JSON object, not {type(value).__name__}")
    return value


def _unique(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key is given twice")
    return result


def view(data: mmap.mmap, dtype: np.dtype, start: int, shape: tuple[int, ...]) -> np.ndarray:
    """Mapped bytes as an array, without a copy where the file aligns them for `dtype`."""
    count = int(np.prod(shape, dtype=np.int64))
    flat = np.frombuffer(data, np.uint8, count * dtype.itemsize, start).view(dtype)
    return np.require(flat.reshape(shape), requirements="A")
