"""One point of a benchmark: an engine of fixed sizes, run several times between two measurements of the ceiling."""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxwafer.engine import Engine, Stats
from jaxwafer.pipeline.queue import Request, Sampling
from jaxwafer.roofline.ceiling import read_ceiling
from jaxwafer.roofline.report import counted

# Two measurements of a ceiling that differ by more say that the machine was not the same throughout.
DRIFT = 0.1


@dataclass(frozen=True, kw_only=True)
class Point:
    """What is run. requests: in flight at once. prompt, new: tokens of each."""

    mesh: str
    requests: int
    micro_batch: int
    prompt: int
    new: int


@dataclass(frozen=True)
class Spread:
    """Of the repetitions."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: list[float]) -> "Spread":
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a point gave. Tokens/s of prefill and decode in all; request_tokens_per_s of one request in decode; ttft_s
    from submission to the first token. bytes_per_token, flops_per_token: counted. ceiling: bytes/s before and after.
    peak_bytes: of the devices where they say so, otherwise of this process since it began."""

    point: Point
    prefill_tokens_per_s: Spread
    decode_tokens_per_s: Spread
    request_tokens_per_s: Spread
    ttft_s: Spread
    bytes_per_token: float
    flops_per_token: float
    ceiling: tuple[float, float]
    peak_bytes: int

    @property
    def mbu(self) -> float:
        """Counted bytes/s at the median over the better of the two ceilings."""
        return self.bytes_per_token * self.decode_tokens_per_s.median / max(self.ceiling)

    @property
    def drifted(self) -> bool:
        return abs(self.ceiling[0] - self.ceiling[1]) > DRIFT * max(self.ceiling)


def measure(engine: Engine, point: Point, repetitions: int, *, between: Callable[[], None] = lambda: None) -> Measured:
    """Run a point once to warm up and `repetitions` times to count. between: called before each counted run, for what
    is to be measured in turn with it."""
    before = read_ceiling(engine.mesh)
    once(engine, point)
    rates: dict[str, list[float]] = {"prefill": [], "decode": [], "request": [], "ttft": []}
    nbytes = flops = tokens = 0.0
    for _ in range(repetitions):
        between()
        engine.stats = Stats()
        requests = once(engine, point)
        stats, traffic = engine.stats, counted(engine)
        rates["prefill"].append(stats.prefill_tokens / stats.prefill_seconds)
        rates["decode"].append(stats.decode_tokens / stats.decode_seconds)
        spans = [(len(r.tokens) - 1) / (r.finished - r.first_token) for r in requests]
        rates["request"].append(statistics.mean(spans))
        rates["ttft"].append(statistics.mean(r.first_token - r.submitted for r in requests))
        nbytes, flops, tokens = nbytes + traffic.bytes, flops + traffic.flops, tokens + stats.decode_tokens
    return Measured(
        point=point,
        prefill_tokens_per_s=Spread.of(rates["prefill"]),
        decode_tokens_per_s=Spread.of(rates["decode"]),
        request_tokens_per_s=Spread.of(rates["request"]),
        ttft_s=Spread.of(rates["ttft"]),
        bytes_per_token=nbytes / tokens,
        flops_per_token=flops / tokens,
        ceiling=(before, read_ceiling(engine.mesh)),
        peak_bytes=peak_bytes(engine),
    )


def once(engine: Engine, point: Point) -> list[Request]:
    """All requests of a point to their ends, with prompts of random tokens that are the same every time."""
    rng = np.random.default_rng(0)
    sampling = Sampling(max_new_tokens=point.new, ignore_eos=True)
    prompts = rng.integers(0, engine.spec.vocab, (point.requests, point.prompt))
    requests = [engine.submit(prompt.tolist(), sampling) for prompt in prompts]
    while engine.queue.busy:
        engine.step()
    return requests


def peak_bytes(engine: Engine) -> int:
    peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in engine.mesh.local_devices]
    # ru_maxrss is in bytes on macOS and in KiB elsewhere.
    host = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return max((peak for peak in peaks if peak), default=host)


class Stopwatch:
    """Seconds of a `with` block."""

    def __enter__(self) -> "Stopwatch":
        self._begin = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.seconds = time.perf_counter() - self._begin
