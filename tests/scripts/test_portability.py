"""The portability report: its quick form, golden traces, and what counts as a difference."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.model.kinds import GQA, KDA, MLA, GatedDeltaNet
from jaxwafer.portability.cases import MESHES, MODELS, StoredCheckpoint, cases
from jaxwafer.portability.measure import run_cases
from jaxwafer.portability.report import across, within
from jaxwafer.quant.formats import FORMATS
from jaxwafer.roofline import ceiling

PATH = Path(__file__).parents[2] / "scripts" / "portability.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("portability", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ceiling, "READ_BYTES", 1 << 20)
        patch.setattr(ceiling, "TARGET_SECONDS", 1e-6)
        return run_cases(cases(quick=True))


@pytest.fixture
def run(script, found, monkeypatch, tmp_path):
    """Runs the script on outcomes that are there already: (status, report, Markdown)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(script, "use_compilation_cache", lambda: None)

    def run(outcomes=found, **arguments):
        monkeypatch.setattr(script, "run_cases", lambda chosen, note: outcomes)
        status = script.main(script.Arguments(quick=True, **arguments))
        return status, json.loads(Path("portability.json").read_text()), Path("portability.md").read_text()

    return run


def test_the_set_has_every_mixer_every_format_and_three_meshes():
    everything = cases(quick=False)
    kinds = {type(k) for fields in MODELS.values() for k in spec_from_config(fields).mixers}
    assert kinds == {GQA, KDA, MLA, GatedDeltaNet}
    assert {(c.model, c.mesh) for c in everything if c.form == "f32"} == {(m, x) for m in MODELS for x in MESHES}
    assert {c.form for c in everything} == set(FORMATS)
    names = [c.name for c in everything]
    assert len(set(names)) == len(names)
    assert all(c.like in names[: names.index(c.name)] for c in everything if c.like)


def test_a_stored_checkpoint_has_its_format_and_a_plain_one_its_values():
    chosen = {c.name: c for c in cases(quick=False)}
    name = "model.layers.0.mlp.down_proj.weight"
    held, plain = (StoredCheckpoint(chosen[n]) for n in ("llama mxfp4 1x1", "llama mxfp4 as f32 1x1"))
    assert (held.stored(name).name, plain.stored(name).name) == ("mxfp4", "f32")
    assert held.read(name).format.name == "mxfp4" and plain.read(name).values.dtype == "float32"


def test_here_every_case_is_like_the_one_it_should_be_like(run, found):
    assert all(verdict.holds for verdict in within(cases(quick=True), found))
    assert all(0 < outcome.aliased and outcome.aliased >= outcome.cache for outcome in found.values())
    status, report, text = run()
    assert status == 0 and report["targets"] == []
    (platform,) = report["platforms"]
    assert platform["facts"]["platform"] == "cpu" and set(platform["outcomes"]) == set(found)
    assert "| llama f32 2x2 | llama f32 1x1 | equal |" in text
    assert "- donated caches written in place: in every case" in text


def test_what_was_recorded_is_checked_and_a_difference_is_status_1(run, found, capsys):
    assert run(record=Path("golden.json"))[0] == 0
    status, report, _ = run(check=Path("golden.json"))
    assert status == 0
    assert sum(v["like"] == "golden.json" for v in report["platforms"][0]["verdicts"]) == len(found)
    name = "llama f32 1x1"
    other = [row[:] for row in found[name].tokens]
    other[0][0] += 1
    status, _, text = run({**found, name: replace(found[name], tokens=other)}, check=Path("golden.json"))
    assert status == 1 and "**differ**" in text
    assert f"{name} against golden.json: other tokens" in " ".join(capsys.readouterr().err.split())


def test_a_difference_above_the_tolerance_does_not_hold(found):
    name = "llama f32 1x1"
    off = replace(found[name], logprobs=[p + 0.01 for p in found[name].logprobs])
    (verdict,) = across({name: off}, found, "elsewhere")
    assert verdict.equal and verdict.difference == pytest.approx(0.01) and not verdict.holds


def test_a_file_that_is_no_record_is_refused(script, tmp_path):
    (tmp_path / "x").write_bytes(msgspec.json.encode({"a": 1}))
    with pytest.raises(UserError, match="is no record of this script"):
        script.read_record(tmp_path / "x")
    with pytest.raises(UserError, match="cannot read"):
        script.read_record(tmp_path / "y")


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no libtpu here; pip install 'jaxwafer[tpu]'")
def test_a_target_is_compiled_for(script, monkeypatch):
    monkeypatch.setattr(script, "MODELS", {"llama": MODELS["llama"]})
    (target,) = script.compiled("v5e:2x2")
    assert (target["target"], target["model"]) == ("v5e:2x2", "llama")
    assert target["programs"]["decode"]["peak"] > 0
