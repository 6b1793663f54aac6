"""Strategies × models × hardware × contexts, each as rows of a CSV with one value a column; what is there is kept.

Rows are written as they are made, so that a study that is stopped goes on where it was. The picture shows, for each
model and hardware, the estimated tokens/s of a request against the requests that a device holds.
"""

import csv
import itertools
from dataclasses import dataclass
from pathlib import Path

import tyro
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.progress import track

from jaxwafer import planner
from jaxwafer.cli.run import NOTES
from jaxwafer.errors import UserError
from jaxwafer.hardware import read_hardware
from jaxwafer.partition.evaluate import Plan
from jaxwafer.partition.problem import Problem

KEYS = ("model", "hardware", "context", "strategy")
VALUES = (
    "row", "wafers", "cores", "devices", "changes", "requests", "binds", "bandwidth_roof", "compute_roof", "estimate",
    "total", "slowest_s", "prefill_s", "tokens_per_s_per_mw", "engine_requests", "refused",
)  # fmt: skip


@dataclass(kw_only=True)
class Arguments:
    """Plan every model on every hardware at every context by every strategy."""

    models: tuple[str, ...] = ("kimi-k3", "kimi-linear-48b-a3b-instruct", "llama-3.1-70b", "glm-4.6")
    """names from checkpoints/, folders, config.json or GGUF files"""
    hardware: tuple[str, ...] = ("wse-3t", "tpu7x", "h200")
    """names from meshes/ or TOML files"""
    contexts: tuple[int, ...] = (8192, 65536, 262144)
    """tokens of a request; those that a model does not have are left out"""
    strategies: tuple[str, ...] = ("uniform", "first-fit", "minmax", "kv-aware", "packed", "regions", "width")
    """names or Python files"""
    kv_cache: str = "fp8"
    """fp8, bf16 or f32"""
    csv: Path = Path("partition_study.csv")
    """the table; rows that it has are not made again"""
    plot: Path | None = Path("partition_study.png")
    """the picture"""


def done(path: Path) -> set[tuple[str, ...]]:
    """Keys of the rows that a table has. Where its last line was cut off, the rows before it with one key go too: there
    may be more of that key."""
    if not path.exists() or not path.stat().st_size:
        return set()
    lines = path.read_text().splitlines(keepends=True)
    if lines[0].strip().split(",") != [*KEYS, *VALUES]:
        raise UserError(f"{path} is no table of this study: give another --csv")
    if not lines[-1].endswith("\n"):
        lines, last = lines[:-1], lines[-2]
        while len(lines) > 1 and lines[-1].split(",")[: len(KEYS)] == last.split(",")[: len(KEYS)]:
            lines.pop()
        path.write_text("".join(lines))
    return {tuple(row[k] for k in KEYS) for row in csv.DictReader(lines)}


def rows(arguments: Arguments, model, key: dict) -> list[dict]:
    """The plans of one strategy as rows, or one row that says why there is none."""
    problem = Problem(model=model, device=read_hardware(key["hardware"]), context=key["context"])
    try:
        plans = planner.solve(problem, key["strategy"]).plans
    except UserError as error:
        return [key | {"row": 0, "refused": str(error)}]
    return [key | _values(plan, number) for number, plan in enumerate(plans, 1)]


def _values(plan: Plan, number: int) -> dict:
    speed = plan.speed
    return {
        "row": number, "wafers": plan.partition.wafers, "cores": plan.cores, "devices": plan.devices,
        "changes": plan.changes, "requests": plan.requests, "binds": plan.capacity.binds,
        "bandwidth_roof": speed.bandwidth_roof, "compute_roof": speed.compute_roof, "estimate": speed.estimate,
        "total": speed.total, "slowest_s": speed.slowest, "prefill_s": plan.prefill_s,
        "tokens_per_s_per_mw": plan.tokens_per_s_per_mw,
        "engine_requests": plan.stored.requests if plan.stored else None,
    }  # fmt: skip


def study(arguments: Arguments) -> int:
    """Make what is missing; the rows that were made."""
    have, made = done(arguments.csv), 0
    needs = {name: planner.open_model(name, kv_cache=arguments.kv_cache) for name in arguments.models}
    todo = [
        dict(zip(KEYS, key, strict=True))
        for key in itertools.product(arguments.models, arguments.hardware, arguments.contexts, arguments.strategies)
        if key[2] <= needs[key[0]].max_context and tuple(map(str, key)) not in have
    ]
    new = not have and not (arguments.csv.exists() and arguments.csv.stat().st_size)
    with arguments.csv.open("a", newline="") as file:
        table = csv.DictWriter(file, [*KEYS, *VALUES])
        if new:
            table.writeheader()
        for key in track(todo, "plan", console=NOTES, disable=not NOTES.is_terminal):
            found = rows(arguments, needs[key["model"]], key)
            table.writerows(found)
            file.flush()
            made += len(found)
    return made


def draw(table: Path, picture: Path) -> None:
    """A panel a model and hardware: requests a device against tokens/s of a request, a colour a strategy."""
    with table.open(newline="") as file:
        found = [row for row in csv.DictReader(file) if not row["refused"]]
    models, hardware = ([*dict.fromkeys(r[k] for r in found)] for k in ("model", "hardware"))
    strategies = [*dict.fromkeys(r["strategy"] for r in found)]
    figure = Figure(figsize=(4 * max(len(hardware), 1), 3 * max(len(models), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(max(len(models), 1), max(len(hardware), 1), squeeze=False)
    for (y, model), (x, device) in itertools.product(enumerate(models), enumerate(hardware)):
        axes = panels[y, x]
        for number, strategy in enumerate(strategies):
            own = [r for r in found if (r["model"], r["hardware"], r["strategy"]) == (model, device, strategy)]
            across = [max(int(r["requests"]), 1) / int(r["devices"]) for r in own]
            axes.scatter(
                across, [float(r["estimate"]) for r in own], s=14, color=f"C{number}", label=strategy, alpha=0.8
            )
        axes.set(xscale="log", title=f"{model} on {device}", xlabel="requests a device", ylabel="tokens/s a request")
        axes.title.set_fontsize(8)
    if found:
        panels[0, 0].legend(fontsize=6)
    figure.savefig(picture, dpi=120)


def main() -> None:
    arguments = tyro.cli(Arguments)
    try:
        made = study(arguments)
        if arguments.plot:
            draw(arguments.csv, arguments.plot)
    except UserError as error:
        NOTES.print(f"partition_study: {error}")
        raise SystemExit(2) from None
    print(f"{made} new rows in {arguments.csv}")


if __name__ == "__main__":
    main()
