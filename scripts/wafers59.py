"""Kimi K3's packed plan at work: its real list of layers and the plan that its real weights need, on as many virtual
CPU devices as the plan has wafers, with small random weights.

The plan packs two layers a wafer for 181 requests of 262,144 tokens; some wafers are passed twice. Every wafer works on
another request, the tokens are those of one wafer, and the trace of ticks is written as a picture.
"""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from jaxwafer import planner
from jaxwafer.checkpoint.cards import card
from jaxwafer.checkpoint.hub import read_config
from jaxwafer.checkpoint.random import RandomCheckpoint
from jaxwafer.cli.run import use_compilation_cache
from jaxwafer.engine import Engine
from jaxwafer.hardware import read_hardware
from jaxwafer.options import Options
from jaxwafer.partition.plan import Partition
from jaxwafer.partition.problem import Problem
from jaxwafer.partition.simulate import tick_trace
from jaxwafer.pipeline.queue import Request, Sampling

REQUESTS, CONTEXT = 181, 262_144
# Sizes in place of K3's; all else is as published.
SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2,
    "q_lora_rank": 8, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "num_experts": 4, "num_experts_per_token": 2, "moe_intermediate_size": 16, "routed_expert_hidden_size": 32,
    "num_shared_experts": 1, "max_position_embeddings": 128, "dtype": "float32",
}  # fmt: skip


def packed(layers: int) -> Partition:
    """The packed plan of the first layers of the real Kimi K3, with its real bytes."""
    model = planner.open_model("kimi-k3", kv_cache="fp8")
    problem = Problem(
        model=replace(model, layers=model.layers[:layers], spec=None),
        device=read_hardware("wse-3t"),
        context=CONTEXT,
        requests=REQUESTS,
        most_layers=2,
    )
    return planner.solve(problem, "packed").best.partition


def small_config(layers: int) -> dict:
    """The published config with small sizes, cut to its first layers."""
    config, _ = read_config(card("kimi-k3").config_path)
    text = config["text_config"] | SMALL | {"num_hidden_layers": layers, "quantization_config": None}
    linear = text["linear_attn_config"] | {"head_dim": 8, "num_heads": 2}
    for name in ("full_attn_layers", "kda_layers"):
        linear[name] = [n for n in linear[name] if n <= layers]
    return config | {"text_config": text | {"linear_attn_config": linear}, "dtype": "float32"}


@dataclass(frozen=True)
class Outcome:
    """trace: micro-batch of each wafer in each tick, −1 for none, int32 [ticks, wafers]. busy: whether the engine's
    wafers worked, bool [ticks, wafers]. tokens: of each request. seconds: of decoding."""

    trace: np.ndarray
    busy: np.ndarray
    tokens: list[list[int]]
    seconds: float


def run(layers: int, partition: Partition, tokens: int, micro_batches: int | None = None) -> Outcome:
    """Decode `tokens` tokens of as many requests as fill the pipeline, a round of ticks at a time."""
    options = Options(
        mesh=f"{partition.wafers}x1", dtype="f32", kv_cache="f32", max_context=32, block=8, prefill_chunk=8,
        micro_batches=micro_batches,
    )  # fmt: skip
    engine = Engine(RandomCheckpoint(small_config(layers)), options, partition=partition)
    plan = engine.placement.schedule
    count = micro_batches or plan.rounds
    requests: list[Request] = [
        engine.submit([3 + n % 80, 5, 7 + n % 11], Sampling(max_new_tokens=tokens + 1)) for n in range(count)
    ]
    rounds, before = [], np.zeros((partition.wafers, plan.period))
    while engine.queue.busy:
        engine.step(rounds=1)
        now = engine.stats.busy_ticks + np.zeros_like(before)
        rounds.append((now - before).T > 0)
        before = now
    trace = tick_trace(plan, [tokens] * count)
    return Outcome(trace, np.concatenate(rounds), [r.tokens for r in requests], engine.stats.decode_seconds)


def draw(path: Path, outcome: Outcome, partition: Partition) -> None:
    """The trace: ticks to the right, wafers down, a colour a micro-batch."""
    figure = Figure(figsize=(14, 7), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    shown = np.ma.masked_less(np.where(outcome.busy, outcome.trace, -1).T, 0)
    image = axes.imshow(shown, aspect="auto", interpolation="nearest", cmap="turbo")
    figure.colorbar(image, label="micro-batch")
    twice = sum(len({v for v in partition.visits if v.wafer == w}) > 1 for w in range(partition.wafers))
    axes.set(xlabel="tick", ylabel="wafer",
             title=f"{partition.wafers} wafers, {twice} of them passed twice; white: idle")  # fmt: skip
    figure.savefig(path, dpi=120)


@dataclass(kw_only=True)
class Arguments:
    """Run Kimi K3's packed plan on virtual CPU devices and draw its ticks."""

    layers: int = 93
    """of the model, from the first"""
    tokens: int = 4
    """of each request"""
    plot: Path = Path("wafers59.png")
    """where the picture goes"""


def main(arguments: Arguments) -> None:
    use_compilation_cache()
    partition = packed(arguments.layers)
    print(f"{arguments.layers} layers on {partition.wafers} wafers, {len(partition.visits)} visits", flush=True)
    began = time.perf_counter()
    many = run(arguments.layers, partition, arguments.tokens)
    print(f"{len(many.tokens)} requests, {len(many.busy)} ticks, {1e3 * many.seconds / len(many.busy):.1f} ms a tick, "
          f"{time.perf_counter() - began:.0f} s with compilation", flush=True)  # fmt: skip
    draw(arguments.plot, many, partition)
    one = Partition((tuple(range(arguments.layers)),))
    alone = run(arguments.layers, one, arguments.tokens, micro_batches=len(many.tokens))
    same = alone.tokens == many.tokens
    expected = np.array_equal(many.busy, many.trace >= 0)
    print(f"tokens of one wafer: {'the same' if same else 'DIFFERENT'}")
    print(f"ticks as simulated: {'yes' if expected else 'NO'}; picture: {arguments.plot}")
    raise SystemExit(0 if same and expected else 1)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
