"""`jaxwafer bench`: speed over meshes, batches and contexts, by one procedure, beside the ceiling of the machine."""

import csv
import io
import itertools
import os
import statistics
from dataclasses import asdict, dataclass

import tyro
from rich.table import Table

from jaxwafer.bench.llama_cpp import LlamaCpp
from jaxwafer.bench.measure import DRIFT, Measured, Point, Spread, measure
from jaxwafer.checkpoint.open import has_weights, open_checkpoint, open_config
from jaxwafer.checkpoint.random import RandomCheckpoint
from jaxwafer.cli.run import NOTES, ModelFlags, OptionalPath, check_writable, load, print_table, write_file, write_json
from jaxwafer.engine import Engine
from jaxwafer.errors import UserError
from jaxwafer.mesh import make_mesh, parse_mesh, reserve
from jaxwafer.options import Options
from jaxwafer.roofline.ceiling import compute_ceiling
from jaxwafer.roofline.table import amount

COMPARED = ("llama.cpp",)


@dataclass(kw_only=True)
class Bench(ModelFlags):
    """Measure prefill and decode speed; a model of which there is but a config runs with random weights."""

    model: tyro.conf.Positional[str]
    """a name from checkpoints/, a Hugging Face folder, a config.json or a GGUF file"""
    mesh: str = "1x1"
    """meshes to measure, with commas, such as 1x1,4x1"""
    requests: str = "1"
    """requests in flight at once, with commas"""
    micro_batch: str = "0"
    """requests that travel together, with commas; 0 spreads the requests evenly over the wafers"""
    prompt_tokens: str = "128"
    """tokens of each prompt, with commas"""
    new_tokens: int = 128
    """tokens generated for each prompt"""
    repetitions: int = 5
    """counted runs of each point, after one to warm up"""
    compare: str = ""
    """llama.cpp: run it on the same GGUF file with as many threads as there are cores, in turn with every run"""
    csv: OptionalPath = None
    """write the points to this file"""
    json: OptionalPath = None
    """write everything to this file"""
    plot: OptionalPath = None
    """write the roofline with the measured points to this PNG file"""

    def run(self) -> None:
        for flag in ("csv", "json", "plot"):
            check_writable(getattr(self, flag), f"--{flag}")
        if self.repetitions < 1:
            raise UserError(f"--repetitions must be at least 1, not {self.repetitions}")
        if self.compare not in ("", *COMPARED):
            raise UserError(f"--compare {self.compare!r}: there is only {', '.join(COMPARED)}")
        points = self._points()
        real = has_weights(self.model)
        source = open_checkpoint(self.model) if real else RandomCheckpoint(open_config(self.model))
        if self.compare and source.path.suffix != ".gguf":
            raise UserError(f"--compare llama.cpp needs a GGUF file, and {self.model} is none")
        if not real:
            NOTES.print(f"{self.model} has no weights here: random ones are measured")
        reserve(parse_mesh(point.mesh) for point in points)
        found, others = [], []
        for number, point in enumerate(points, 1):
            NOTES.print(f"point {number} of {len(points)}: {describe(point)}")
            theirs: list[tuple[float, float]] = []
            rival = LlamaCpp(source.path, point, os.cpu_count() or 1) if self.compare else None
            if rival:
                rival.run()
            between = (lambda rival=rival, theirs=theirs: theirs.append(rival.run())) if rival else (lambda: None)
            found.append(measure(self._engine(source, point), point, self.repetitions, between=between))
            others.append(tuple(map(statistics.median, zip(*theirs, strict=True))) if theirs else None)
        for table in bench_tables(self.model, found, others):
            print_table(table)
        for measured in found:
            if measured.drifted:
                before, after = (f"{rate / 1e9:.1f}" for rate in measured.ceiling)
                NOTES.print(f"{describe(measured.point)}: the ceiling went from {before} to {after} GB/s, more than "
                            f"{DRIFT:.0%}: the machine was not the same throughout")  # fmt: skip
        rows = [as_row(m, other) for m, other in zip(found, others, strict=True)]
        if self.csv:
            write_file(self.csv, as_csv(rows).encode())
        if self.json:
            write_json(self.json, {"model": self.model, "weights": self.weights, "kv_cache": self.kv_cache,
                                   "repetitions": self.repetitions, "points": rows})  # fmt: skip
        if self.plot:
            from jaxwafer.bench.plot import roofline

            mesh = make_mesh(parse_mesh(points[0].mesh))
            figure = roofline(found, compute_ceiling(mesh, "float32"), self.model)
            image = io.BytesIO()
            figure.savefig(image, format="png", dpi=150)
            write_file(self.plot, image.getvalue())

    def _points(self) -> list[Point]:
        sweep = itertools.product(
            self.mesh.split(","), counts("--prompt-tokens", self.prompt_tokens), counts("--requests", self.requests),
            counts("--micro-batch", self.micro_batch, least=0),
        )  # fmt: skip
        if self.new_tokens < 2:
            raise UserError(f"--new-tokens must be at least 2, not {self.new_tokens}")
        found = []
        for mesh, prompt, requests, together in sweep:
            wafers = parse_mesh(mesh).wafers
            found.append(Point(mesh=mesh, requests=requests, micro_batch=together or -(-requests // wafers),
                               prompt=prompt, new=self.new_tokens))  # fmt: skip
        return found

    def _engine(self, source, point: Point) -> Engine:
        micro_batches = -(-point.requests // point.micro_batch)
        context = self.max_context or point.prompt + point.new
        options = Options(
            mesh=point.mesh, weights=self.weights, kv_cache=self.kv_cache, dtype=self.dtype,
            activations=self.activations, max_context=context, prefill_chunk=self.prefill_chunk,
            micro_batch=point.micro_batch, micro_batches=micro_batches,
        )  # fmt: skip
        return load(source, options)


def counts(flag: str, text: str, least: int = 1) -> list[int]:
    """Whole numbers with commas between them."""
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} {text!r} should be whole numbers with commas between them") from None
    if min(found) < least:
        raise UserError(f"{flag} must be at least {least}, not {min(found)}")
    return found


def describe(point: Point) -> str:
    return (f"{point.mesh}, {point.requests} requests by {point.micro_batch}, "
            f"{point.prompt} + {point.new} tokens")  # fmt: skip


def as_row(measured: Measured, other: tuple[float, float] | None) -> dict:
    """A flat row for CSV and JSON; seconds, bytes and tokens/s."""
    row = asdict(measured.point)
    for name in ("prefill_tokens_per_s", "decode_tokens_per_s", "request_tokens_per_s", "ttft_s"):
        spread = getattr(measured, name)
        row |= {name: spread.median, f"{name}_least": spread.least, f"{name}_most": spread.most}
    row |= {"bytes_per_token": measured.bytes_per_token, "flops_per_token": measured.flops_per_token,
            "ceiling_before_bytes_per_s": measured.ceiling[0], "ceiling_after_bytes_per_s": measured.ceiling[1],
            "mbu": measured.mbu, "drifted": measured.drifted, "peak_bytes": measured.peak_bytes}  # fmt: skip
    if other:
        row |= {"llama_cpp_prefill_tokens_per_s": other[0], "llama_cpp_decode_tokens_per_s": other[1],
                "prefill_ratio": measured.prefill_tokens_per_s.median / other[0],
                "decode_ratio": measured.decode_tokens_per_s.median / other[1]}  # fmt: skip
    return row


def as_csv(rows: list[dict]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def bench_tables(model: str, found: list[Measured], others: list[tuple[float, float] | None]) -> list[Table]:
    """Speed, what it is held against, and the other engine where there is one: each can be read in 80 columns."""

    def rate(spread: Spread) -> str:
        least, median, most = (f"{x:.{0 if x >= 100 else 1}f}" for x in (spread.least, spread.median, spread.most))
        return median if least == most else f"{median} ({least}-{most})"

    speed = {
        "prefill tok/s": [rate(m.prefill_tokens_per_s) for m in found],
        "decode tok/s": [rate(m.decode_tokens_per_s) for m in found],
        "first token": [f"{m.ttft_s.median * 1e3:.0f} ms" for m in found],
    }
    machine = {
        "a request tok/s": [rate(m.request_tokens_per_s) for m in found],
        "ceiling": [f"{max(m.ceiling) / 1e9:.1f} GB/s" for m in found],
        "MBU": [f"{m.mbu:.1%}" for m in found],
        "peak": [amount(m.peak_bytes, "B") for m in found],
    }
    tables = [
        _table(f"{model}: medians, with the least and the most", found, speed),
        _table("beside the machine's memory", found, machine),
    ]
    if any(others):
        pairs = list(zip(found, others, strict=True))
        compared = {
            "prefill tok/s": [f"{other[0]:.1f}" for _, other in pairs],
            "prefill ratio": [f"{m.prefill_tokens_per_s.median / other[0]:.2f}" for m, other in pairs],
            "decode tok/s": [f"{other[1]:.1f}" for _, other in pairs],
            "decode ratio": [f"{m.decode_tokens_per_s.median / other[1]:.2f}" for m, other in pairs],
        }
        tables.append(_table("llama.cpp, in turn with every run of ours", found, compared))
    return tables


def _table(title: str, found: list[Measured], columns: dict[str, list[str]]) -> Table:
    table = Table(title=title, title_justify="left")
    points = [measured.point for measured in found]
    columns = {
        "mesh": [point.mesh for point in points],
        "requests": [f"{point.requests} by {point.micro_batch}" for point in points],
        "prompt + new": [f"{point.prompt} + {point.new}" for point in points],
    } | columns
    for name in columns:
        table.add_column(name, justify="right")
    for cells in zip(*columns.values(), strict=True):
        table.add_row(*cells)
    return table
