"""The report of a run: what was generated, how fast, how close to the roofline, and what binds."""

import platform
import resource
import sys
import time
from functools import cached_property
from importlib.metadata import version

import numpy as np

from jaxwafer.engine import Engine
from jaxwafer.model.attention import MLA
from jaxwafer.model.declare import StateField, TokenField
from jaxwafer.model.spec import ModelSpec
from jaxwafer.pipeline.queue import Request
from jaxwafer.roofline.ceiling import compute_ceiling, read_ceiling, stream_ceiling, tick_latency
from jaxwafer.roofline.counters import Counts, Traffic, decode_traffic, imbalance


class Run:
    """Measures a run of `engine` from here to `report`: `with Run(engine) as run: …`, then `run.report(requests)`.

    Ceilings are measured before and after, so that a machine whose speed drifts is seen to.
    """

    def __init__(self, engine: Engine, model: str):
        self.engine, self.model = engine, model

    def __enter__(self) -> "Run":
        self._before = read_ceiling(self.engine.mesh)
        self._compiling, self._begin = self.engine.programs.seconds, time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self.wall = time.perf_counter() - self._begin
        self.wall -= self.engine.programs.seconds - self._compiling

    def report(self, requests: list[Request]) -> dict:
        """Everything `--json` writes; see docs/report.md for each field."""
        engine, stats, options = self.engine, self.engine.stats, self.engine.options
        return {
            "model": self.model,
            "mesh": {"wafers": engine.placement.wafers, "cores": engine.placement.cores,
                     "device": engine.mesh.devices.flat[0].device_kind},
            "weights": options.weights,
            "kv_cache": options.kv_cache,
            "dtype": options.compute_type(engine.mesh.devices.flat[0].platform),
            "activations": options.activations,
            "outputs": [self._output(r) for r in requests],
            "totals": {
                "prefill_tokens": stats.prefill_tokens,
                "prefill_tokens_per_s": _rate(stats.prefill_tokens, stats.prefill_seconds),
                "decode_tokens": stats.decode_tokens,
                "decode_tokens_per_s": _rate(stats.decode_tokens, stats.decode_seconds),
                "wall_s": self.wall,
            },
            "roofline": self._roofline(),
            "compile": {"count": engine.programs.compiles, "seconds": engine.programs.seconds},
            "memory": self._memory(),
            "backends": engine.programs.pipeline.ops.report(
                engine.programs.pipeline.dtype, engine.placement.formats, engine.placement.expert_formats,
                operations(engine.spec),
            ),
            **({"streaming": self._streaming()} if options.stream_weights else {}),
            "versions": {p: version(p) for p in ("jaxwafer", "jax", "jaxlib")} | {"python": platform.python_version()},
        }  # fmt: skip

    def _output(self, request: Request) -> dict:
        span = request.finished - request.first_token if request.finished else 0.0
        return {
            "prompt": request.text,
            "text": request.output,
            "prompt_tokens": len(request.prompt),
            "tokens": list(request.tokens),
            "finish_reason": request.finish,
            "ttft_s": request.first_token - request.submitted,
            "tokens_per_s": _rate(len(request.tokens) - 1, span),
        }

    def _roofline(self) -> dict:
        engine, stats = self.engine, self.engine.stats
        mesh, place, dtype = engine.mesh, engine.placement, engine.programs.pipeline.dtype
        counts, traffic = tallied(engine), counted(engine)
        after = read_ceiling(mesh)
        ceiling, peak = max(self._before, after), compute_ceiling(mesh, dtype)
        latency = tick_latency(
            mesh,
            sums=-(-2 * place.slots // place.schedule.period),
            shape=(engine.options.micro_batch, place.spec.hidden),
        )
        achieved = traffic.bytes / stats.decode_seconds if stats.decode_seconds else 0.0
        per_token = 1.0 / max(stats.decode_tokens, 1)
        shares = {
            "bandwidth": traffic.bytes / ceiling,
            "latency": stats.ticks * latency,
            "host": max(self.wall - stats.decode_seconds - stats.prefill_seconds, 0.0),
        }
        if engine.options.stream_weights:
            streaming = self._streaming()
            shares["streaming"] = streaming["bytes_per_token"] * stats.decode_tokens / streaming["ceiling_bytes_per_s"]
        rest = stats.decode_seconds - sum(shares[s] for s in ("bandwidth", "latency", "streaming") if s in shares)
        shares["compute"] = max(rest, traffic.flops / peak)
        mbu = achieved / ceiling
        weights = {f"weights {name}": nbytes * per_token for name, nbytes in sorted(traffic.weights.items()) if nbytes}
        return {
            "bytes_per_token": weights | {"kv": traffic.kv * per_token, "state": traffic.state * per_token,
                                          "hops": traffic.hops * per_token,
                                          "total": traffic.bytes * per_token},
            "padding_bytes_per_token": traffic.padding * per_token,
            "flops_per_token": traffic.flops * per_token,
            "ceiling_bytes_per_s": ceiling,
            "ceiling_before_after_bytes_per_s": [self._before, after],
            "ceiling_flops_per_s": peak,
            "achieved_bytes_per_s": achieved,
            "achieved_flops_per_s": traffic.flops / stats.decode_seconds if stats.decode_seconds else 0.0,
            "mbu": mbu,
            "bound": max(shares, key=shares.get) if stats.decode_tokens else None,
            "seconds": shares | {"decode": stats.decode_seconds},
            "ticks": stats.ticks,
            "tick_s": stats.decode_seconds / max(stats.ticks, 1),
            "bubble_fraction": 1.0 - float(np.sum(counts.busy_ticks)) / max(stats.ticks * place.wafers, 1),
            "imbalance": imbalance(engine.cache_shape, counts),
            "fault": "MBU above 100%: bytes were counted that were not moved, or the ceiling was measured too low"
            if mbu > 1 else None,
        }  # fmt: skip

    @cached_property
    def _stream_ceiling(self) -> float:
        return stream_ceiling(self.engine.mesh)

    def _streaming(self) -> dict:
        """What layers brought from host memory took, and the tokens/s that their bytes allow at most."""
        stats, place = self.engine.stats, self.engine.placement
        moved = stats.ticks / place.schedule.period * place.wafers * place.streamed_bytes
        each = moved / max(stats.decode_tokens, 1)
        return {
            "bytes_per_token": each,
            "ceiling_bytes_per_s": self._stream_ceiling,
            "bound_tokens_per_s": self._stream_ceiling / each if each else None,
        }

    def _memory(self) -> dict:
        engine, place, cache = self.engine, self.engine.placement, self.engine.cache_shape
        # ru_maxrss is in bytes on macOS and in KiB elsewhere.
        unit = 1 if sys.platform == "darwin" else 1024
        peaks = [(d.memory_stats() or {}).get("peak_bytes_in_use") for d in engine.mesh.local_devices]
        return {
            "weights_bytes_per_wafer": [place.weight_bytes(w) for w in range(place.wafers)],
            "weights_allocated_bytes_per_wafer": place.allocated_bytes,
            "kv_bytes_per_token_per_wafer": [cache.wafer_token_bytes(w) for w in range(place.wafers)],
            "state_bytes_per_request_per_wafer": [cache.wafer_state_bytes(w) for w in range(place.wafers)],
            "kv_allocated_bytes_per_wafer": cache.allocated_bytes,
            "kv_tokens": cache.blocks * cache.block,
            "decode_temp_bytes_per_device": engine.programs.temp_bytes,
            "peak_device_bytes": max((p for p in peaks if p), default=None),
            "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        }


def tallied(engine: Engine) -> Counts:
    """What the wafers tallied since the engine's stats began."""
    stats, place = engine.stats, engine.placement
    names = ("busy_ticks", "tokens", "kv_rows")
    if stats.bursts:
        return Counts(**{name: getattr(stats, name) for name in (*names, "experts")})
    nothing = {name: np.zeros((place.wafers, place.schedule.period)) for name in names}
    return Counts(**nothing, experts=np.zeros((place.wafers, len(place.mlps))))


def counted(engine: Engine) -> Traffic:
    """Bytes and FLOPs of all decoding since the engine's stats began."""
    return decode_traffic(engine.cache_shape, engine.cache_shape.dtype.itemsize, tallied(engine))


def operations(spec: ModelSpec) -> set[str]:
    """The operations beside matrix products that a model's layers use."""
    fields = {type(field) for kind in spec.mixers for field in kind.cache()}
    found = {"sampling", "embedding"}
    if any(isinstance(kind, MLA) for kind in spec.mixers):
        found.add("products by head")
    if TokenField in fields:
        found |= {"KV append", "attention"}
    if StateField in fields:
        found.add("linear attention")
    return found


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if seconds > 0 and count > 0 else None
