"""`jaxwafer plan`, `jaxwafer calibrate`, and `jaxwafer decode --partition`."""

import json
from pathlib import Path

import pytest
from support import checkpoint, greedy

PLAN = ("plan", "m", "--hardware", "wse-3t", "--context", "64")


def plan(jaxwafer, *argv: str) -> tuple[str, dict]:
    status, out, err = jaxwafer(*argv, "--json", "plan.json")
    assert (status, err) == (0, "")
    return out, json.loads(Path("plan.json").read_text())


def test_a_plan_is_printed_and_written(folder, jaxwafer):
    out, found = plan(jaxwafer, *PLAN, "--strategy", "minmax,width", "--wafers", "2", "--requests", "3")
    title = "m on WSE-3T: 548 kB of weights, at least 1 wafers of 1 by bytes, 64 tokens a request"
    assert " ".join(out.split()).startswith(title)
    assert all(f"\n{part}" in out for part in ("minmax: 2 wafers", "a token's way", "outcome", "micro-batches"))
    assert found["plan"]["layers"] == [[0, 1], [2, 3, 4]] or found["plan"]["layers"] == [[0, 1, 2], [3, 4]]
    assert found["plan"]["strategy"] == "minmax" and found["plan"]["capacity"]["requests"] >= 3
    assert found["plan"]["engine"]["weights"] > 0 and found["plan"]["hardware"]["sources"]["hop_s"]
    assert len(found["sweep"]) == 100 and len(found["plans"]) >= 2


def test_a_row_other_than_the_best_can_be_taken(folder, jaxwafer):
    _, found = plan(jaxwafer, *PLAN, "--strategy", "kv-aware,uniform", "--row", "2")
    assert found["plan"] == found["plans"][1]


def test_all_strategies_say_why_one_gives_nothing(folder, jaxwafer):
    status, out, _ = jaxwafer("plan", "m/config.json", "--hardware", "h200", "--set", "usd_per_hour=3")
    assert status == 0
    assert "none by regions: regions need the cores of a wafer's own fabric, which H200 SXM has not" in out
    assert "USD a million tokens" in out and "3 USD an hour a device" in out


def test_pictures_are_written(folder, jaxwafer):
    status, _, _ = jaxwafer(*PLAN, "--strategy", "minmax", "--plot", "p.png", "--html", "p.html")
    assert status == 0 and Path("p.png").read_bytes()[:4] == b"\x89PNG"
    assert Path("p.html").read_text().endswith("</html>")


def test_files_are_whole_when_the_reader_of_the_tables_goes_away(folder, jaxwafer, monkeypatch):
    def gone(table):
        raise BrokenPipeError

    monkeypatch.setattr("jaxwafer.cli.plan.print_table", gone)
    status, out, err = jaxwafer(*PLAN, "--strategy", "minmax", "--json", "plan.json", "--html", "p.html")
    assert (status, out, err) == (141, "", "")
    assert json.loads(Path("plan.json").read_text())["plan"]["strategy"] == "minmax" and Path("p.html").exists()


def test_a_strategy_of_ones_own_is_named_by_its_file(folder, jaxwafer):
    Path("own.py").write_text(
        "from jaxwafer.partition.plan import uniform\n"
        "from jaxwafer.partition.problem import Proposal\n"
        "def propose(problem):\n    return [Proposal(partition=uniform(problem.count, 5))]\n"
    )
    _, found = plan(jaxwafer, *PLAN, "--strategy", "own.py")
    assert found["plan"]["strategy"] == "own.py" and found["plan"]["wafers"] == 5


def test_the_engine_runs_what_was_planned(folder, jaxwafer):
    """A strategy of one's own goes back to the first wafer; the engine goes that way and gives the tokens of one."""
    Path("back.py").write_text(
        "from jaxwafer.partition.plan import Visit, routed\n"
        "from jaxwafer.partition.problem import Proposal\n"
        "def propose(problem):\n"
        "    way = ((0, (0, 1)), (1, (2,)), (0, (3, 4)))\n"
        "    return [Proposal(partition=routed(tuple(Visit(w, n) for w, n in way), 2))]\n"
    )
    _, found = plan(jaxwafer, *PLAN, "--strategy", "back.py")
    assert found["plan"]["changes"] == 3
    status, _, err = jaxwafer("decode", "m", "--partition", "plan.json", "--dtype", "f32", "--kv-cache", "f32",
                              "--prompt", "t5 t17 t3", "--max-new-tokens", "5", "--json", "r.json")  # fmt: skip
    assert (status, err) == (0, "")
    report = json.loads(Path("r.json").read_text())
    assert report["outputs"][0]["tokens"] == greedy(checkpoint(), [5, 17, 3], 5)
    assert report["mesh"] == {"wafers": 2, "cores": 1, "device": "cpu"}
    # The engine allocates the bytes that the plan said.
    assert report["memory"]["weights_allocated_bytes_per_wafer"] == found["plan"]["engine"]["weights"]


def test_the_simulation_is_printed_beside_the_closed_form(folder, jaxwafer):
    out, found = plan(jaxwafer, *PLAN, "--strategy", "minmax", "--wafers", "2", "--simulate", "40", "--prompt-tokens",
                      "32", "--output-tokens", "16", "--arrivals-per-second", "1000")  # fmt: skip
    assert "simulated: 40 requests" in out and "time to first token, median" in out
    simulated = found["simulation"]
    assert simulated["tokens"] == 640 and len(simulated["utilisation"]) == 2
    assert 0 < simulated["steady_tokens_per_s"] <= 1.01 * found["plan"]["speed"]["total"]
    assert min(simulated["first_token_s"]) > 0


def test_rows_are_printed_with_their_errors(jaxwafer, tmp_path):
    path = tmp_path / "c.json"
    status, out, _ = jaxwafer("calibrate", "wse-3", "--json", path)
    assert status == 0 and "mean error on rows left out 0.9%" in out and "overhead = 5.171" in out
    found = json.loads(path.read_text())
    assert [round(s["error"], 3) for s in found["scores"]] == [-0.009, 0.009]
    assert found["constants"]["left_out_error"] == 0.0092 and len(found["compared"]) == 5


@pytest.mark.parametrize(
    "argv, message",
    [
        (["plan"], "plan needs MODEL and --hardware (see: jaxwafer plan --help)"),
        (["plan", "m"], "plan needs MODEL and --hardware (see: jaxwafer plan --help)"),
        (["plan", "nope", "--hardware", "h200"], "there is no model 'nope'; give "),
        (
            ["plan", "m", "--hardware", "h300"],
            "there is no hardware 'h300'; give a TOML file, this-machine or one of: ",
        ),
        ([*PLAN, "--strategy", "best"], "there is no strategy 'best'; give all, a Python file or one of: uniform, "),
        ([*PLAN, "--context", "513"], "--context 513 is more than the 512 positions that m has"),
        ([*PLAN, "--context", "0"], "--context must be at least 1, not 0"),
        ([*PLAN, "--wafers", "0"], "--wafers must be at least 1, not 0"),
        ([*PLAN, "--wafers", "9"], "--wafers 9 are more than m can use: it has 5 layers, and 1 more"),
        ([*PLAN, "--plot", "x.jpg"], "--plot x.jpg: pictures are PNG files; give a name that ends in .png"),
        ([*PLAN, "--wafers", "5000"], "--wafers must be at most 4096, not 5000"),
        ([*PLAN, "--cores", "1000000000"], "--cores must be at most 4096, not 1000000000"),
        ([*PLAN, "--cores", "-1"], "--cores must be at least 1, not -1"),
        ([*PLAN, "--requests", "0"], "--requests must be at least 1, not 0"),
        ([*PLAN, "--micro-batch", "0"], "--micro-batch must be at least 1, not 0"),
        ([*PLAN, "--most-layers", "0"], "--most-layers must be at least 1, not 0"),
        ([*PLAN, "--requests", "1e3"], "--requests should be a whole number, not '1e3' (see: jaxwafer plan --help)"),
        ([*PLAN, "--change-cost", "-1"], "--change-cost must be at least 0 and below 1e6, not -1"),
        ([*PLAN, "--accepted", "nan"], "--accepted must be at least 1 and below 1000, not nan"),
        ([*PLAN, "--vocabulary", "x"], "unknown --vocabulary 'x'; choose one of room, mesh, ends"),
        ([*PLAN, "--weights", "x"], "unknown weight policy 'x'; choose one of native, "),
        ([*PLAN, "--kv-cache", "x"], "unknown KV cache format 'x'; choose one of fp8, bf16, f32"),
        ([*PLAN, "--compute", "fp4"], "WSE-3T has no rate for fp4 arithmetic; choose one of bf16"),
        ([*PLAN, "--set", "hop_s=x"], "--set 'hop_s=x' should be NAME=NUMBER, such as hop_s=28e-6"),
        ([*PLAN, "--row", "99"], "--row must be from 1 to "),
        ([*PLAN, "--simulate", "0"], "--simulate must be at least 1, not 0"),
        ([*PLAN, "--simulate", "5", "--prompt-tokens", "-1"], "--prompt-tokens must be 0 or more, not -1"),
        ([*PLAN, "--simulate", "5", "--output-tokens", "0"], "--output-tokens must be at least 1, not 0"),
        ([*PLAN, "--simulate", "5", "--arrivals-per-second", "0"], "--arrivals-per-second must be positive, not 0"),
        (
            [*PLAN, "--simulate", "5", "--prompt-tokens", "64"],
            "--prompt-tokens 64 and --output-tokens 256 are more than ",
        ),
        ([*PLAN, "--target-tokens-per-second", "0"], "--target-tokens-per-second must be a positive number, not 0"),
        (
            [*PLAN, "--target-tokens-per-second", "5", "--wafers", "2"],
            "--target-tokens-per-second looks for wafers and ",
        ),
        ([*PLAN, "--target-tokens-per-second", "1e9"], "nothing reaches 1e+09 tokens/s: the nearest is "),
        (
            [*PLAN, "--set", "memory_bytes=3e4", "--strategy", "minmax"],
            "layer 0 (GQA + DenseMLP) takes 0.00 GB with 1 requests of 64 tokens, but ",
        ),
        ([*PLAN, "--plot", "no/p.png"], "--plot no/p.png: there is no folder "),
        ([*PLAN, "--html", "."], "--html . cannot be written: give a file in a folder that is yours"),
        (["decode", "m", "--prompt", "t1", "--partition", "no.json"], "cannot read --partition no.json: No such file"),
        (["decode", "m", "--prompt", "t1", "--partition", "m/config.json"], "--partition m/config.json is no plan "),
        (["calibrate", "this-machine"], "this-machine has no constants to fit: plan measures its rates"),
        (["calibrate", "h200"], "there are no measured rows of h200"),
        (["calibrate", "wse-3", "--rows", "no.toml"], "cannot read --rows no.toml: No such file or directory"),
    ],
)
def test_bad_input(folder, refused, argv, message):
    assert refused(*argv).startswith(message)


def test_a_plan_of_another_model_or_mesh_is_refused(folder, refused):
    Path("p.json").write_text('{"plan": {"layers": [[0, 1]], "cores": 1}}')
    decode = ("decode", "m", "--prompt", "t1", "--partition", "p.json")
    assert refused(*decode).startswith("the partition must hold layers 0 to 4 once each, in order")
    assert refused(*decode, "--mesh", "2x1") == "the partition is for 1 wafers, but the mesh 2x1 has 2"
