"""`jaxwafer bench` on a config alone: its sweep, its files, and what it refuses."""

import csv
import json

import pytest
from support import config

from jaxwafer.cli import bench as module
from jaxwafer.cli.main import main


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config(num_hidden_layers=2)))
    return str(path)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr("jaxwafer.bench.measure.read_ceiling", lambda mesh: 1e10)
    monkeypatch.setattr(module, "compute_ceiling", lambda mesh, dtype: 1e11)


def test_every_combination_is_a_row(model, quick, tmp_path, capfd):
    files = {flag: tmp_path / f"bench.{flag}" for flag in ("csv", "json")}
    plot = tmp_path / "bench.png"
    args = ["bench", model, "--mesh", "1x1,2x1", "--requests", "3", "--prompt-tokens", "4", "--new-tokens", "3",
            "--repetitions", "2", "--plot", str(plot)]  # fmt: skip
    assert main([*args, *(part for flag, path in files.items() for part in (f"--{flag}", str(path)))]) == 0
    with files["csv"].open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["mesh"], r["requests"], r["micro_batch"]) for r in rows] == [
        ("1x1", "3", "3"), ("2x1", "3", "2"),
    ]  # fmt: skip
    report = json.loads(files["json"].read_text())
    assert (report["model"], report["repetitions"], len(report["points"])) == (model, 2, 2)
    for row, point in zip(rows, report["points"], strict=True):
        assert float(row["decode_tokens_per_s"]) == point["decode_tokens_per_s"]
        assert point["mbu"] == pytest.approx(point["bytes_per_token"] * point["decode_tokens_per_s"] / 1e10)
    assert plot.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    printed = capfd.readouterr()
    assert "llama" not in printed.out and "has no weights here: random ones" in " ".join(printed.err.split())


def test_every_flag_of_a_model_reaches_the_engine(model, monkeypatch):
    class Loaded(Exception):
        pass

    def load(source, options):
        assert (options.activations, options.prefill_chunk, options.dtype) == ("float", 32, "bf16")
        assert (options.weights, options.kv_cache, options.max_context) == ("int4", "fp8", 48)
        raise Loaded

    monkeypatch.setattr(module, "load", load)
    with pytest.raises(Loaded):
        main(["bench", model, "--activations", "float", "--prefill-chunk", "32", "--dtype", "bf16", "--weights", "int4",
              "--kv-cache", "fp8", "--max-context", "48", "--prompt-tokens", "8", "--new-tokens", "8"])  # fmt: skip


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--requests", "0"), "--requests must be at least 1, not 0"),
        (("--requests", "1;2"), "--requests '1;2' should be whole numbers with commas between them"),
        (("--prompt-tokens", "-4"), "--prompt-tokens must be at least 1, not -4"),
        (("--new-tokens", "1"), "--new-tokens must be at least 2, not 1"),
        (("--repetitions", "0"), "--repetitions must be at least 1, not 0"),
        (("--compare", "vllm"), "--compare 'vllm': there is only llama.cpp"),
        (("--compare", "llama.cpp"), "--compare llama.cpp needs a GGUF file"),
        (("--csv", "/nowhere/x.csv"), "--csv /nowhere/x.csv: there is no folder /nowhere"),
        (("--mesh", "2by2"), "--mesh '2by2' is neither WxC"),
    ],
)
def test_what_cannot_be_measured_is_refused(flags, message, model, capfd):
    assert main(["bench", model, *flags]) == 2
    assert capfd.readouterr().err.startswith(f"jaxwafer: {message}")
