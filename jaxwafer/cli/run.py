"""What the commands that run a model share."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import jax
import tyro
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from jaxwafer.cache_dir import cache_folder
from jaxwafer.checkpoint.source import Checkpoint
from jaxwafer.engine import Engine
from jaxwafer.errors import UserError
from jaxwafer.options import Options
from jaxwafer.partition.plan import Partition

# Names and texts are printed as they are: "[" and ":" mean nothing in them.
PLAIN = {"markup": False, "emoji": False, "highlight": False}
NOTES = Console(stderr=True, **PLAIN)


# Without this the help and every message offer the word None as a value.
OptionalInt = Annotated[int | None, tyro.conf.arg(constructor=int, metavar="INT", help_behavior_hint="")]
OptionalText = Annotated[str | None, tyro.conf.arg(constructor=str, metavar="TEXT", help_behavior_hint="")]
OptionalPath = Annotated[Path | None, tyro.conf.arg(constructor=Path, metavar="PATH", help_behavior_hint="")]


@dataclass(kw_only=True)
class ModelFlags:
    """Flags of every command that runs a model."""

    mesh: OptionalText = None
    """wafers x cores, such as 4x2, or a TOML file or name from meshes/ (default: 1x1)"""
    weights: str = "native"
    """native (as stored), mixed (MLP int4, attention fp8, embedding and head int8), int4, fp8, int8, bf16 or f32"""
    kv_cache: str = "bf16"
    """fp8, bf16 or f32"""
    dtype: str = "auto"
    """type of activations: bf16, f32, or auto: f32 on CPUs and bf16 elsewhere"""
    activations: str = "float"
    """int8: rounded to int8 in blocks of 32 where they meet integer weights and a kernel can; float: never rounded"""
    max_context: OptionalInt = None
    """most tokens of a request, prompt and output (default: what the prompts need)"""
    prefill_chunk: int = 256
    """most prompt tokens a tick"""

    def options(self, **sizes) -> Options:
        """What these flags ask of an engine, checked. sizes: further fields of `Options`."""
        context = {} if self.max_context is None else {"max_context": self.max_context}
        return Options(
            mesh=self.mesh or "1x1", weights=self.weights, kv_cache=self.kv_cache, dtype=self.dtype,
            activations=self.activations,
            prefill_chunk=self.prefill_chunk, **(context | sizes),
        )  # fmt: skip


def load(checkpoint: Checkpoint, options: Options, partition: Partition | None = None) -> Engine:
    """An engine, with a progress bar while weights load."""
    use_compilation_cache()
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    try:
        with progress_bar(*columns) as bar:
            task = bar.add_task("compile", total=None)
            return Engine(
                checkpoint, options, partition=partition,
                progress=lambda done, total: bar.update(task, description="load", completed=done, total=total),
            )  # fmt: skip
    except jax.errors.JaxRuntimeError as error:
        raise _memory(error) from error


def progress_bar(*columns) -> Progress:
    """A bar on stderr that leaves nothing behind; nothing at all where stderr is no terminal."""
    return Progress(*columns, console=NOTES, transient=True, disable=not NOTES.is_terminal)


def print_table(table: Table) -> None:
    Console(**PLAIN).print(table)


def check_writable(path: Path | None, flag: str = "--json") -> None:
    """Refuse a file that could not be written later, before any work goes into what it should hold."""
    if path is None:
        return
    if flag == "--plot" and path.suffix.lower() not in ("", ".png"):
        raise UserError(f"{flag} {path}: pictures are PNG files; give a name that ends in .png")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise UserError(f"{flag} {path}: there is no folder {folder}")
    if path.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"{flag} {path} cannot be written: give a file in a folder that is yours")


def make_folder(flag: str, path: Path) -> None:
    """The folder that a flag names, made where it is missing."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot make the folder {flag} {path}: {error.strerror}") from None


def write_json(path: Path, report: dict) -> None:
    write_file(path, (json.dumps(report, indent=1) + "\n").encode())


def write_file(path: Path, data: bytes) -> None:
    """Write beside the place of a file and move it there whole; a pipe or a device is written to as it is."""
    try:
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        path = path.resolve()
        partial = path.with_name(path.name + ".partial")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None


def read_input(flag: str, path: Path) -> str:
    """The text of a file that a flag names."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {flag} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{flag} {path} is not UTF-8 text") from None


def _memory(error: Exception) -> Exception:
    """A device that ran out of memory is the user's to mend; anything else is a fault of ours."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    return UserError("out of device memory: use smaller weights, a shorter --max-context or a larger --mesh")


def use_compilation_cache() -> None:
    """Keep compiled programs between runs."""
    jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
