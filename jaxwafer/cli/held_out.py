"""Held-out prompts of the tasks that the bundled checkpoint was trained on, and how many of its answers are right."""

from collections.abc import Sequence

from rich.table import Table

from jaxwafer.errors import UserError
from jaxwafer.pipeline.queue import Request
from jaxwafer.train import tasks
from jaxwafer.train.tasks import Example

MOST = 10_000


def examples(count: int) -> list[Example]:
    """`count` of each task, the same ones whenever asked."""
    if not 1 <= count <= MOST:
        raise UserError(f"held-out must be from 1 to {MOST}, not {count}")
    return [example for task in tasks.TASKS for example in tasks.held_out(task, count)]


def grade(requests: Sequence[Request], asked: Sequence[Example]) -> dict[str, dict[str, int]]:
    """{task: {"right": …, "of": …}}; an answer is right if all of its text is, and it ended by itself."""
    found = {example.task: {"right": 0, "of": 0} for example in asked}
    for request, example in zip(requests, asked, strict=True):
        found[example.task]["of"] += 1
        found[example.task]["right"] += right(request, example)
    return found


def right(request: Request, example: Example) -> bool:
    return request.finish == "stop" and request.output == example.answer


def graded_line(request: Request, example: Example) -> str:
    """A prompt, without the middle of a long one, the model's answer, and the right one where it differs."""
    words = request.text.split()
    if len(words) > 40:
        words = [*words[:9], f"… {len(words) - 18} more …", *words[-9:]]
    verdict = "" if right(request, example) else f"   (wrong: {example.answer})"
    return f"{' '.join(words)}  →  {request.output}{verdict}"


def grade_table(grades: dict[str, dict[str, int]]) -> Table:
    table = Table(title="held-out prompts answered exactly", title_justify="left")
    for name in ("task", "right", "of", ""):
        table.add_column(name, justify="left" if name == "task" else "right")
    for task, grade in grades.items():
        table.add_row(task, str(grade["right"]), str(grade["of"]), f"{grade['right'] / grade['of']:.1%}")
    whole, of = (sum(grade[n] for grade in grades.values()) for n in ("right", "of"))
    table.add_section()
    table.add_row("all", str(whole), str(of), f"{whole / of:.1%}")
    return table
