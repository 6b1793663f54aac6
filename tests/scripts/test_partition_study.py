"""The study: a table with one value a column, that goes on where it was."""

import csv
import importlib.util
from pathlib import Path

import pytest

from jaxwafer.errors import UserError

PATH = Path(__file__).parents[2] / "scripts" / "partition_study.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("partition_study", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def arguments(script, folder: Path, **changes):
    fields = {
        "models": ("qwen3-0.6b", "kimi-linear-48b-a3b-instruct"), "hardware": ("h200",), "contexts": (8192, 65536),
        "strategies": ("minmax", "regions"), "csv": folder / "t.csv", "plot": folder / "p.png",
    }  # fmt: skip
    return script.Arguments(**(fields | changes))


def read(path: Path) -> list[dict]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_combination_has_a_row(script, tmp_path):
    asked = arguments(script, tmp_path)
    assert script.study(asked) == 6
    found = read(asked.csv)
    # qwen3-0.6b has 40960 positions.
    assert [(r["model"][:5], r["context"], r["strategy"]) for r in found] == [
        ("qwen3", "8192", "minmax"), ("qwen3", "8192", "regions"), ("kimi-", "8192", "minmax"),
        ("kimi-", "8192", "regions"), ("kimi-", "65536", "minmax"), ("kimi-", "65536", "regions"),
    ]  # fmt: skip
    assert all(int(r["requests"]) > 0 and float(r["estimate"]) > 0 for r in found if r["strategy"] == "minmax")
    assert all("regions need" in r["refused"] and not r["wafers"] for r in found if r["strategy"] == "regions")
    script.draw(asked.csv, asked.plot)
    assert asked.plot.read_bytes()[:4] == b"\x89PNG"


def test_a_study_that_was_stopped_goes_on(script, tmp_path):
    asked = arguments(script, tmp_path, models=("qwen3-0.6b",))
    script.study(asked)
    whole = asked.csv.read_text()
    assert script.study(asked) == 0 and asked.csv.read_text() == whole
    asked.csv.write_text(whole[: whole.rindex("qwen3") + 20])
    assert script.study(asked) == 2 and asked.csv.read_text() == whole


def test_another_table_is_not_written_to(script, tmp_path):
    asked = arguments(script, tmp_path)
    asked.csv.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="t.csv is no table of this study: give another --csv"):
        script.study(asked)
