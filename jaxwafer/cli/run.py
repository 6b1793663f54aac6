"""What the commands that run a model share."""

from dataclasses import dataclass

import jax
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from jaxwafer.cache_dir import cache_folder
from jaxwafer.checkpoint.open import open_checkpoint
from jaxwafer.checkpoint.source import Checkpoint
from jaxwafer.engine import Engine, Options
from jaxwafer.errors import UserError

NOTES = Console(stderr=True)


@dataclass(kw_only=True)
class ModelFlags:
    """Flags of every command that runs a model."""

    mesh: str = "1x1"
    """wafers x cores, such as 4x2, or a TOML file or name from meshes/"""
    weights: str = "native"
    """native (as stored), mixed (MLP int4, attention fp8, embedding and head int8), int4, fp8, int8, bf16 or f32"""
    kv_cache: str = "bf16"
    """fp8, bf16 or f32"""
    dtype: str = "bf16"
    """type of activations: bf16 or f32"""
    max_context: int | None = None
    """most tokens of a request, prompt and output (default: what the prompts need)"""
    prefill_chunk: int = 256
    """most prompt tokens a tick"""


def load(model: str, flags: ModelFlags, checkpoint: Checkpoint | None = None, **sizes) -> Engine:
    """An engine, with a progress bar while weights load. sizes: further `Options`."""
    use_compilation_cache()
    checkpoint = checkpoint or open_checkpoint(model)
    options = Options(
        mesh=flags.mesh, weights=flags.weights, kv_cache=flags.kv_cache, dtype=flags.dtype,
        prefill_chunk=flags.prefill_chunk, **sizes,
    )  # fmt: skip
    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn()
    try:
        with Progress(*columns, console=NOTES, transient=True) as bar:
            task = bar.add_task("compile", total=None)
            return Engine(
                checkpoint, options,
                progress=lambda done, total: bar.update(task, description="load", completed=done, total=total),
            )  # fmt: skip
    except jax.errors.JaxRuntimeError as error:
        raise _memory(error) from error


def _memory(error: Exception) -> Exception:
    """A device that ran out of memory is the user's to mend; anything else is a fault of ours."""
    if "RESOURCE_EXHAUSTED" not in str(error):
        return error
    return UserError("out of device memory: use smaller weights, a shorter --max-context or a larger --mesh")


def use_compilation_cache() -> None:
    """Keep compiled programs between runs."""
    jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
