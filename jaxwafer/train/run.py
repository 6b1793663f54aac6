"""The program behind `scripts/train_tiny`: trains, prints progress, and writes the checkpoint with its card."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import tyro

from jaxwafer.cache_dir import cache_folder
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.train import tasks
from jaxwafer.train.export import export
from jaxwafer.train.loop import CONFIG, QUANTIZE_FROM, STAGES, WIDTH, train


@dataclass(kw_only=True)
class Train:
    """Train a small Kimi Linear on five tasks and write it in the hub's layout."""

    out: Path
    """the folder to write"""
    seed: int = 0
    """of the initial weights and of the prompts"""
    devices: int = 2
    """virtual devices that share the rows of a step"""
    every: int = 50
    """steps between lines of progress, at each of which the folder is written anew"""

    def run(self) -> None:
        rows = [n for stage in STAGES for n in (sum(stage.short.values()), stage.recall)]
        if self.devices < 1 or self.every < 1 or any(n % self.devices for n in rows):
            raise UserError(
                f"devices must divide {', '.join(map(str, sorted(set(rows))))} rows, and every be at least 1"
            )
        try:
            self.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder --out {self.out}: {error.strerror}") from None
        jax.config.update("jax_num_cpu_devices", self.devices)
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
        begin, steps = time.perf_counter(), sum(stage.steps for stage in STAGES)
        recent: dict[str, list[float]] = {}
        for number, (metrics, params) in enumerate(train(CONFIG, STAGES, self.seed), 1):
            for name, value in metrics.items():
                recent.setdefault(name, []).append(value)
            if number % self.every == 0 or number == steps:
                minutes = (time.perf_counter() - begin) / 60
                shown = "  ".join(f"{name} {np.mean(values):.3f}" for name, values in recent.items())
                print(f"{number}/{steps}  {minutes:.1f} min  {shown}", flush=True)
                recent.clear()
                export(params, CONFIG, self.out)
        (self.out / "README.md").write_text(card(self.seed, self.devices, minutes))
        print(f"wrote {self.out}")


def card(seed: int, devices: int, minutes: float) -> str:
    spec = spec_from_config(dict(CONFIG))
    steps = sum(stage.steps for stage in STAGES)
    tokens = sum(stage.steps * (sum(stage.short.values()) * WIDTH + stage.recall * stage.width) for stage in STAGES)
    pairs, asked = tasks.SIZES["recall"][1], tasks.ASKED_PAIRS[1]
    return f"""---
license: apache-2.0
pipeline_tag: text-generation
tags: [kimi_linear, compressed-tensors]
---
# tiny-kimi-linear

A small Kimi Linear (`KimiLinearForCausalLM`), trained from nothing on tasks whose answers can be checked exactly. It
tests engines: a broken state, cache, pipeline hop or quantiser shows as wrong answers. It knows no language.

- {spec.parameters:,} parameters, {spec.active_parameters:,} of them active: 8 layers, 6 of Kimi Delta Attention
  and 2 of latent attention, the first with a dense MLP, the others with 2 of {CONFIG["num_experts"]} experts and shared
  ones.
- Matrices in int4, groups of 32, as compressed-tensors packs them; routers, decays, gates, norms, embedding and head
  in bfloat16.
- Words separated by spaces: letters a to z, digits 0 to 6, {len(tasks.KEYS)} syllables, five names of tasks. No chat
  template. Answers end with `<eos>`.

| task | prompt | answer |
|---|---|---|
| copy | `copy d k a =` | `d k a` |
| reverse | `reverse d k a =` | `a k d` |
| sort | `sort d k a =` | `a d k` |
| modulo | `modulo d 3 k 5 a 2 =` | `d 3 3 k 5 1 a 2 3`, each number with the sum so far, modulo 7 |
| recall | `recall ba q ce d ? ce` | `d`; {asked} pairs and {tasks.ASKED_CONTEXT} tokens before the question are safe |

Trained by `scripts/train_tiny` in {minutes:.0f} minutes on {devices} CPU cores (seed {seed}, {steps} steps,
{tokens / 1e6:.1f} million tokens, padding included): Muon and AdamW, cross-entropy of answers alone, prompts that grow
over each of two stages, the second with up to {pairs} pairs, biases of the router balanced without a loss, and from
step {QUANTIZE_FROM} on the int4 and bfloat16 rounding of the file, with a straight-through gradient. One prompt in
eight, by a hash, is held out of training; held-out accuracy is in the repository's README.
"""


if __name__ == "__main__":
    try:
        tyro.cli(Train).run()
    except UserError as error:
        print(f"train_tiny: {error}", file=sys.stderr)
        sys.exit(2)
