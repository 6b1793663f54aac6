"""What charts show, read back from their axes."""

import pytest
from matplotlib.figure import Figure
from partition.problems import layer, problem

from jaxwafer.hardware import Constants
from jaxwafer.partition.evaluate import evaluate
from jaxwafer.partition.plan import Partition, Visit, routed, uniform
from jaxwafer.partition.problem import Proposal
from jaxwafer.picture import charts
from jaxwafer.picture.sheet import png

CONSTANTS = Constants(basis="none", date="", layer_s=0.01, bandwidth_efficiency=0.5)
BACK = routed((Visit(0, (0,)), Visit(1, (1, 2)), Visit(0, (3,))), 2)


def plan(partition: Partition = BACK):
    layers = [layer(20, state=10), layer(30, token=1), layer(10, token=2), layer(20, state=5)]
    asked = problem(layers, context=8, hidden=1, embedding=6, max_context=64, constants=CONSTANTS)
    return evaluate(asked, Proposal(partition=partition), "own")


@pytest.fixture
def axes():
    return Figure().add_subplot()


def test_revisits_are_changes_to_an_earlier_wafer():
    assert charts.revisits(BACK) == [(1, 0)]
    assert charts.revisits(uniform(4, 3)) == []
    assert charts.revisits(Partition(((0, 1), (), (2, 3)))) == []


def test_the_strip_fills_each_wafers_memory(axes):
    found = plan()
    charts.strip(axes, found)
    heights = [bar.get_height() * 1e9 for bar in axes.patches if bar.__class__.__name__ == "Rectangle"]
    expected = [getattr(w, name) for name in charts.FILLS for w in found.wafers]
    assert heights == pytest.approx(expected)
    assert sum(heights) == pytest.approx(2 * found.problem.memory)
    assert [t.get_text() for t in axes.get_xticklabels()] == ["0,3", "1-2"]
    assert sum(p.__class__.__name__ == "FancyArrowPatch" for p in axes.patches) == 1
    assert "3 changes of wafers (1 to an earlier one)" in axes.get_title(loc="left")


def test_the_waterfall_ends_at_the_estimate(axes):
    found = plan()
    charts.waterfall(axes, found)
    *steps, whole = [bar.get_height() for bar in axes.patches]
    assert sum(steps) == pytest.approx(whole) == pytest.approx(1e3 / found.speed.estimate)
    assert steps[0] == pytest.approx(1e3 / found.speed.bandwidth_roof)


def test_requests_against_context_with_the_cross_over(axes):
    found = plan()
    charts.contexts(axes, found)
    lines = {line.get_label(): line for line in axes.lines}
    kv, state, fit = (lines[n].get_ydata() for n in ("KV alone", "state alone", "requests that fit"))
    assert all(f <= min(k, s) for f, k, s in zip(fit, kv, state, strict=True))
    # 56 bytes over 15 of state, and over 3 a token: with more than five tokens KV binds.
    assert state[0] == 3 and found.capacity.crossover == 6
    assert any(line.get_xdata()[0] == 6 for line in axes.lines)


def test_a_sheet_is_a_png():
    found = plan()
    assert png(found, (found, plan(uniform(4, 4))))[:8] == b"\x89PNG\r\n\x1a\n"
