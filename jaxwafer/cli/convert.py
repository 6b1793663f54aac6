"""`jaxwafer convert`: a checkpoint written anew in the hub's layout, in other number formats if asked."""

from dataclasses import dataclass
from pathlib import Path

import tyro

from jaxwafer.checkpoint.open import open_checkpoint
from jaxwafer.checkpoint.write import SHARD_BYTES, write_checkpoint
from jaxwafer.cli.run import progress_bar
from jaxwafer.errors import UserError
from jaxwafer.roofline.table import amount


@dataclass
class Convert:
    """Write a model as a Hugging Face folder: sharded safetensors, config.json and tokenizer files."""

    model: tyro.conf.Positional[str]
    """a name from checkpoints/, a Hugging Face folder, or a GGUF file"""
    out: tyro.conf.Positional[Path]
    """the folder to write, which must not be there yet"""
    weights: str = "native"
    """native (as stored), mixed (MLP int4, attention fp8, embedding and head int8), int4, fp8, int8, bf16 or f32"""
    shard_bytes: int = SHARD_BYTES
    """most bytes of one file"""

    def run(self) -> None:
        if self.shard_bytes < 1:
            raise UserError(f"--shard-bytes must be at least 1, not {self.shard_bytes}")
        source = open_checkpoint(self.model)
        with progress_bar() as bar:
            task = bar.add_task("convert", total=None)
            total = write_checkpoint(
                source, self.out, self.weights, shard_bytes=self.shard_bytes,
                progress=lambda done, total: bar.update(task, completed=done, total=total),
            )  # fmt: skip
        print(f"{self.out}: {amount(total, 'B')} of tensors")
