"""The report of a run: every field, and figures that follow from others."""

import json
import math

import jax
import numpy as np
import pytest
from support import checkpoint, engine

from jaxwafer.pipeline.queue import Sampling
from jaxwafer.roofline import report as module
from jaxwafer.roofline.counters import Counts, decode_traffic
from jaxwafer.roofline.report import Run
from jaxwafer.roofline.table import amount, roofline_table

CEILING, PEAK, LATENCY = 1e12, 1e13, 1e-9
NUMBER = (int, float)
# Every field and its type; a list stands for a list of such. What may be absent of a measurement is None.
SCHEMA = {
    "model": str,
    "mesh": {"wafers": int, "cores": int, "device": str},
    "weights": str,
    "kv_cache": str,
    "dtype": str,
    "activations": str,
    "outputs": [
        {"prompt": str, "text": str, "prompt_tokens": int, "tokens": [int], "finish_reason": str, "ttft_s": float,
         "tokens_per_s": float}
    ],
    "totals": {"prefill_tokens": int, "prefill_tokens_per_s": float, "decode_tokens": int,
               "decode_tokens_per_s": float, "wall_s": float},
    "roofline": {
        "bytes_per_token": {"weights f32": float, "kv": float, "state": float, "hops": float, "total": float},
        "padding_bytes_per_token": float, "flops_per_token": float,
        "ceiling_bytes_per_s": float, "ceiling_before_after_bytes_per_s": [float], "ceiling_flops_per_s": float,
        "achieved_bytes_per_s": float, "achieved_flops_per_s": float, "mbu": float, "bound": str,
        "seconds": {"bandwidth": float, "compute": float, "latency": float, "host": float, "decode": float},
        "ticks": int, "tick_s": float, "bubble_fraction": float, "imbalance": float, "fault": type(None),
    },
    "compile": {"count": int, "seconds": float},
    "memory": {
        "weights_bytes_per_wafer": [int], "weights_allocated_bytes_per_wafer": int,
        "kv_bytes_per_token_per_wafer": [int], "state_bytes_per_request_per_wafer": [int],
        "kv_allocated_bytes_per_wafer": int, "kv_tokens": int,
        "decode_temp_bytes_per_device": int, "peak_device_bytes": (int, type(None)), "peak_host_bytes": int,
    },
    "backends": {
        "matmul f32": {"backend": str, "reason": str}, "attention": {"backend": str, "reason": str},
        "embedding": {"backend": str, "reason": str}, "KV append": {"backend": str, "reason": str},
        "sampling": {"backend": str, "reason": str},
    },
    "versions": {"jaxwafer": str, "jax": str, "jaxlib": str, "python": str},
}  # fmt: skip


@pytest.fixture(scope="module")
def machine():
    return engine(checkpoint(num_hidden_layers=4), mesh="2x1", max_context=32, prefill_chunk=32, burst=1)


def ceilings(monkeypatch, *read: float):
    left = list(read)
    monkeypatch.setattr(module, "read_ceiling", lambda mesh: left.pop(0) if len(left) > 1 else left[0])
    monkeypatch.setattr(module, "compute_ceiling", lambda mesh, dtype: PEAK)
    monkeypatch.setattr(module, "tick_latency", lambda mesh, *, sums, shape: LATENCY)


def measure(machine, *requests: tuple[list[int], Sampling]) -> dict:
    machine.stats = type(machine.stats)()
    with Run(machine, "tiny") as measured:
        queued = [machine.submit(p, s) for p, s in requests]
        while machine.queue.busy:
            machine.step()
    return measured.report(queued)


@pytest.fixture(scope="module")
def report(machine):
    """Two prompts of three tokens, each with four tokens to decode after the first."""
    with pytest.MonkeyPatch.context() as patch:
        ceilings(patch, CEILING / 2, CEILING)
        return measure(machine, *(([n, 4, 5], Sampling(max_new_tokens=5)) for n in (2, 3)))


def check(value, schema, where="report"):
    if isinstance(schema, dict):
        assert isinstance(value, dict) and set(value) == set(schema), where
        for name, inner in schema.items():
            check(value[name], inner, f"{where}.{name}")
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, where
        for item in value:
            check(item, schema[0], where)
    else:
        assert isinstance(value, schema) and not isinstance(value, bool), f"{where}: {value!r}"


def test_the_json_has_exactly_these_fields(report):
    check(report, SCHEMA)
    again = json.loads(json.dumps(report, allow_nan=False))
    check(again, SCHEMA)


def test_the_run_is_described_as_it_was_asked_for(report, machine):
    assert (report["model"], report["weights"], report["kv_cache"], report["dtype"]) == ("tiny", "native", "f32", "f32")
    assert (report["mesh"]["wafers"], report["mesh"]["cores"]) == (2, 1)
    assert report["compile"] == {"count": machine.programs.compiles, "seconds": machine.programs.seconds}


def test_tokens_are_those_of_the_requests(report):
    assert [o["prompt"] for o in report["outputs"]] == ["<2><4><5>", "<3><4><5>"]
    for output in report["outputs"]:
        assert output["text"] == "".join(f"<{t}>" for t in output["tokens"])
        assert (len(output["tokens"]), output["prompt_tokens"], output["finish_reason"]) == (5, 3, "length")
        assert output["ttft_s"] > 0 and output["tokens_per_s"] > 0
    assert (report["totals"]["prefill_tokens"], report["totals"]["decode_tokens"]) == (6, 8)


def test_rates_are_counts_over_seconds_of_device_calls(report, machine):
    totals, stats = report["totals"], machine.stats
    assert totals["decode_tokens_per_s"] == pytest.approx(8 / stats.decode_seconds)
    assert totals["prefill_tokens_per_s"] == pytest.approx(6 / stats.prefill_seconds)
    assert totals["wall_s"] >= stats.decode_seconds + stats.prefill_seconds


def test_the_roofline_is_counted_bytes_over_the_better_ceiling(report, machine):
    roof, stats = report["roofline"], machine.stats
    counts = Counts(stats.busy_ticks, stats.tokens, stats.kv_rows, stats.experts)
    traffic = decode_traffic(machine.cache_shape, 4, counts)
    parts = roof["bytes_per_token"]
    assert parts["total"] == pytest.approx(sum(v for n, v in parts.items() if n != "total"))
    assert parts["total"] * 8 == pytest.approx(traffic.bytes) and parts["kv"] * 8 == traffic.kv
    assert roof["flops_per_token"] * 8 == traffic.flops
    assert roof["ceiling_before_after_bytes_per_s"] == [CEILING / 2, CEILING]
    assert (roof["ceiling_bytes_per_s"], roof["ceiling_flops_per_s"]) == (CEILING, PEAK)
    assert roof["achieved_bytes_per_s"] == pytest.approx(traffic.bytes / stats.decode_seconds)
    assert roof["mbu"] == pytest.approx(roof["achieved_bytes_per_s"] / CEILING) and roof["mbu"] < 1


def test_the_bubble_is_the_share_of_wafer_ticks_without_a_request(report):
    """Nine ticks on two wafers, eight of them busy on each."""
    roof = report["roofline"]
    assert roof["ticks"] == 9 and roof["bubble_fraction"] == pytest.approx(1 - 16 / 18)
    assert roof["tick_s"] * 9 == pytest.approx(roof["seconds"]["decode"])
    assert roof["imbalance"] == pytest.approx(1.0)


def test_what_binds_is_the_largest_share_of_the_time(report):
    seconds = report["roofline"]["seconds"]
    shares = {n: seconds[n] for n in ("bandwidth", "compute", "latency", "host")}
    assert report["roofline"]["bound"] == max(shares, key=shares.get)
    assert seconds["latency"] == pytest.approx(9 * LATENCY)
    assert all(s >= 0 and math.isfinite(s) for s in seconds.values())


def test_memory_is_that_of_the_arrays(report, machine):
    def on_devices(tree) -> int:
        return sum(shard.data.nbytes for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)

    memory = report["memory"]
    weights, kv = on_devices(machine.weights), on_devices(machine._cache)
    assert memory["weights_allocated_bytes_per_wafer"] * 2 == weights
    assert memory["kv_allocated_bytes_per_wafer"] * 2 == kv
    assert memory["kv_tokens"] * sum(memory["kv_bytes_per_token_per_wafer"]) == kv
    assert memory["weights_bytes_per_wafer"] == [memory["weights_allocated_bytes_per_wafer"]] * 2
    assert memory["peak_host_bytes"] > weights + kv


def test_mbu_above_100_percent_is_reported_as_a_fault_of_the_measurement(machine, monkeypatch):
    ceilings(monkeypatch, 1.0)
    roof = measure(machine, ([2, 4, 5], Sampling(max_new_tokens=3)))["roofline"]
    assert roof["mbu"] > 1
    assert roof["fault"].startswith("MBU above 100%: bytes were counted that were not moved, or the ceiling")


def test_a_run_that_decodes_nothing_has_no_rates_and_no_bound(machine, monkeypatch):
    ceilings(monkeypatch, CEILING)
    report = measure(machine, ([2, 4, 5], Sampling(max_new_tokens=1)))
    assert report["totals"]["decode_tokens_per_s"] is None and report["outputs"][0]["tokens_per_s"] is None
    roof = report["roofline"]
    assert (roof["bound"], roof["mbu"], roof["bytes_per_token"]["total"], roof["fault"]) == (None, 0.0, 0.0, None)
    json.dumps(report, allow_nan=False)
    assert roofline_table(report).row_count > 15


def test_the_text_of_an_output_ends_before_the_stop_text(machine, monkeypatch, report):
    ceilings(monkeypatch, CEILING)
    tokens = report["outputs"][0]["tokens"]
    stop = f"<{tokens[2]}>"
    (output,) = measure(machine, ([2, 4, 5], Sampling(max_new_tokens=5, stop=(stop,))))["outputs"]
    end = tokens.index(tokens[2])
    assert (output["tokens"], output["finish_reason"]) == (tokens[: end + 1], "stop")
    assert output["text"] == "".join(f"<{t}>" for t in tokens[:end])


def test_ceilings_are_of_this_mesh_before_and_after_the_run(machine, monkeypatch):
    seen = []
    ceilings(monkeypatch, CEILING)
    monkeypatch.setattr(module, "read_ceiling", lambda mesh: seen.append((mesh, len(machine.queue.running))) or CEILING)
    measure(machine, ([2], Sampling(max_new_tokens=2)))
    assert seen == [(machine.mesh, 0)] * 2


@pytest.mark.parametrize(
    "value, text",
    [
        (None, "n/a"),
        (0.0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1.25e9, "1.25 GB"),
        (3.5e12, "3.5 TB"),
        (2e6, "2 MB"),
    ],
)
def test_amounts_have_si_prefixes(value, text):
    assert amount(value, "B") == text


def test_the_table_says_what_the_report_says(report):
    cells = [list(column.cells) for column in roofline_table(report).columns]
    rows = dict(zip(cells[0], zip(cells[1], cells[2], strict=True), strict=True))
    roof = report["roofline"]
    assert rows["MBU"] == (f"{roof['mbu']:.1%}", "achieved / ceiling")
    assert rows["bubble"][0] == f"{1 - 16 / 18:.1%}" and rows["bound by"][0] == roof["bound"]
    assert rows["bandwidth ceiling"][0] == "1 TB/s"
    assert rows["attention"] == tuple(report["backends"]["attention"].values())
    assert np.isclose(
        float(rows["decode, all requests"][0].split()[0]), report["totals"]["decode_tokens_per_s"], atol=0.06
    )


def test_streamed_weights_are_counted_and_bound_what_is_possible(monkeypatch):
    ceilings(monkeypatch, CEILING)
    monkeypatch.setattr(module, "stream_ceiling", lambda mesh: 1e6)
    streamed = engine(
        checkpoint(num_hidden_layers=3), mesh="2x1", max_context=32, prefill_chunk=32, stream_weights=True
    )
    report = measure(streamed, ([1, 4, 5], Sampling(max_new_tokens=5)))
    place = streamed.placement
    # Both wafers have two slots; that the second one's last is empty spares it nothing.
    layer = place.layer_bytes(place.mixers[0]) + place.layer_bytes(place.mlps[0])
    assert place.streamed_bytes == 2 * layer
    moved = report["roofline"]["ticks"] * 2 * 2 * layer
    assert report["streaming"] == {
        "bytes_per_token": moved / 4, "ceiling_bytes_per_s": 1e6, "bound_tokens_per_s": 1e6 / (moved / 4),
    }  # fmt: skip
    assert report["roofline"]["seconds"]["streaming"] == pytest.approx(moved / 1e6)
    assert report["roofline"]["bound"] == "streaming"
    cells = [list(column.cells) for column in roofline_table(report).columns]
    assert cells[2][cells[0].index("bytes a token: streamed")].startswith("from host memory at 1 MB/s")
