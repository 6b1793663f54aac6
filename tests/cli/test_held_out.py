"""`jaxwafer decode` on the bundled checkpoint: prompts of its own, and how many answers are right."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from jaxwafer.cli.decode import Decode
from jaxwafer.cli.held_out import examples, grade, graded_line
from jaxwafer.train import tasks
from jaxwafer.train.tasks import Example


def request(text: str, output: str, finish: str = "stop"):
    return SimpleNamespace(text=text, output=output, finish=finish)


def test_an_answer_is_right_if_all_of_it_is_and_it_ended():
    asked = [Example("sort", "sort b a =", "a b")] * 4 + [Example("copy", "copy a =", "a")]
    answers = [("a b", "stop"), ("a b", "length"), ("a", "stop"), ("a b c", "stop"), ("a", "stop")]
    requests = [request(e.prompt, *a) for e, a in zip(asked, answers, strict=True)]
    assert grade(requests, asked) == {"sort": {"right": 1, "of": 4}, "copy": {"right": 1, "of": 1}}


def test_a_graded_line_is_short_and_shows_what_was_wrong():
    example = Example("copy", "copy a b =", "a b")
    assert graded_line(request(example.prompt, "a b"), example) == "copy a b =  →  a b"
    assert graded_line(request(example.prompt, "a c"), example) == "copy a b =  →  a c   (wrong: a b)"
    long = request(" ".join(str(n) for n in range(100)), "x")
    shown = graded_line(long, Example("recall", long.text, "x"))
    assert shown == f"{' '.join(map(str, range(9)))} … 82 more … {' '.join(map(str, range(91, 100)))}  →  x"


def test_examples_are_the_same_ones_of_every_task():
    found = examples(3)
    assert [e.task for e in found] == [task for task in tasks.TASKS for _ in range(3)]
    assert found == examples(3) and examples(5)[:3] == found[:3]


@pytest.mark.parametrize(
    "command, count",
    [(Decode(), 20), (Decode(held_out=2), 10), (Decode(prompt=("copy a =",)), 0), (Decode(model="m"), 0),
     (Decode(model="m", held_out=1), 5), (Decode(prompt=("copy a =",), held_out=1), 5)],
)  # fmt: skip
def test_when_held_out_prompts_are_asked(command, count):
    assert len(command._held_out()) == count


def test_the_bundled_model_answers_and_is_graded(jaxwafer, tmp_path):
    report = tmp_path / "r.json"
    status, out, err = jaxwafer(
        "decode", "--mesh", "1x1", "--prompt", "sort d k a =", "--held-out", "1", "--micro-batch", "6", "--json", report
    )
    assert (status, err) == (0, "")
    found = json.loads(Path(report).read_text())
    assert found["outputs"][0]["text"] == "a d k" and "sort d k a =\na d k\n" in out
    assert found["held_out"] == {task: {"right": 1, "of": 1} for task in tasks.TASKS}
    assert [o["prompt"] for o in found["outputs"][1:]] == [e.prompt for e in examples(1)]
    assert "held-out prompts answered exactly" in out and "100.0%" in out
