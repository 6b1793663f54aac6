"""Layers that wait in external memory and come in one by one."""

import numpy as np
import pytest

from jaxwafer.errors import UserError
from jaxwafer.planner import solve, with_figures

from .problems import layer, problem

EXTERNAL = {"external_bytes": 300.0, "external_bytes_per_s": 100.0}


def streamed(layers, hardware=EXTERNAL, **fields):
    return problem(layers, hardware=hardware, streamed=True, **fields)


def test_more_layers_fit_than_the_wafer_holds_and_their_rate_binds():
    """Six layers of 20 bytes on 100: a window of two leaves 60, a request keeps 6 · 2; 20 bytes take 0.2 s."""
    layers = [layer(20, token=2)] * 6
    with pytest.raises(UserError, match="at least 2 wafers"):
        solve(problem(layers, wafers=1), "minmax")
    best = solve(streamed(layers), "minmax").best
    assert (best.partition.wafers, best.requests) == (1, 5)
    wafer = best.wafers[0]
    assert (wafer.weights, wafer.external, wafer.kv, wafer.free) == (40, 120, 60, 0)
    assert np.isclose(best.speed.estimate, 1 / 1.2) and best.speed.binds == "streaming"
    assert np.isclose(best.speed.bandwidth_roof, 1 / (6 * 22e-3))


def test_what_takes_longer_than_its_weights_come_in_takes_its_own_time():
    best = solve(streamed([layer(20, token=1)] * 6, EXTERNAL | {"external_bytes_per_s": 2000.0}), "minmax").best
    assert np.isclose(best.speed.estimate, 1 / (6 * 21e-3)) and best.speed.binds == "memory"


@pytest.mark.parametrize("strategy", ["uniform", "first-fit", "minmax", "kv-aware", "packed"])
def test_external_memory_bounds_the_layers_of_a_wafer(strategy):
    """120 bytes in external memories of 50: two layers each, three wafers."""
    found = solve(streamed([layer(20, token=1)] * 6, EXTERNAL | {"external_bytes": 50.0}), strategy)
    assert found.best.partition.wafers == 3
    assert all(wafer.external <= 50 for plan in found.plans for wafer in plan.wafers)


def test_vocabulary_at_the_ends_stays():
    best = solve(streamed([layer(20, token=1)] * 3, vocabulary="ends", embedding=30, head=31), "minmax").best
    assert best.partition.wafers == 2 and [w.vocabulary for w in best.wafers] == [30, 31]


def test_what_cannot_be():
    layers = [layer(20, token=1)] * 6
    with pytest.raises(UserError, match="--stream-weights needs the external memory of toy, which is not described"):
        problem(layers, streamed=True)
    with pytest.raises(UserError, match="regions keep their layers"):
        solve(streamed(layers), "regions")
    with pytest.raises(UserError, match="two layers that stream take"):
        solve(streamed([layer(50, token=1)] * 2), "minmax")
    with pytest.raises(UserError, match="layer 0 .* of external memory"):
        solve(streamed(layers, EXTERNAL | {"external_bytes": 10.0}), "minmax")


def test_external_memory_can_be_set_by_hand():
    device = with_figures(problem([layer(1)]).device, ("external_bytes=5", "external_bytes_per_s=2"))
    assert (device.hardware.external_bytes, device.hardware.external_bytes_per_s) == (5, 2)
