"""When each visit of a route runs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxwafer.errors import UserError
from jaxwafer.partition.plan import Visit, circular, routed, uniform
from jaxwafer.partition.schedule import schedule


def test_the_plain_ring_is_a_round_of_one_phase():
    plan = schedule(uniform(30, 4))
    assert (plan.times, plan.period, plan.rounds, plan.entry, plan.exit) == ((0, 1, 2, 3), 1, 4, 0, (3, 0, 3))
    assert plan.hops(0) == [(0, 1), (1, 2), (2, 3)]
    assert plan.lags(0).tolist() == [0, 1, 2, 3] and plan.inbox(0).tolist() == [1, 0, 0, 0]


def test_two_laps_of_three_wafers_take_two_phases():
    plan = schedule(circular(12, 3, 2))
    assert (plan.times, plan.period, plan.rounds) == ((0, 1, 2, 3, 4, 5), 2, 3)
    # Wafer 0 runs chunk 0 in phase 0 and chunk 3, three ticks later, in phase 1 of the next round.
    assert [plan.at(0, phase) for phase in range(2)] == [0, 3] and plan.lags(1).tolist() == [1, 0, 2]


def test_laps_that_meet_in_one_phase_are_pulled_apart_by_a_wait():
    plan = schedule(circular(8, 2, 2))
    assert plan.period == 2 and plan.times == (0, 1, 3, 4)


def packed_k3() -> tuple[Visit, ...]:
    """Kimi K3's 93 layers: full-attention layers alone on a wafer; of each run of three linear ones two share a wafer
    and the third shares one with the third of the next run."""
    full = {*range(3, 92, 4), 92}
    visits, free, shared, layer = [], iter(range(93)), None, 0
    while layer < 93:
        if layer in full:
            visits.append(Visit(next(free), (layer,)))
            layer += 1
            continue
        visits.append(Visit(next(free), (layer, layer + 1)))
        if shared is None:
            shared = next(free)
            visits.append(Visit(shared, (layer + 2,)))
        else:
            visits.append(Visit(shared, (layer + 2,)))
            shared = None
        layer += 3
    return tuple(visits)


def test_the_packed_route_of_kimi_k3_runs_on_59_wafers_without_a_wait():
    visits = packed_k3()
    wafers = 1 + max(v.wafer for v in visits)
    plan = schedule(routed(visits, wafers).check(93))
    assert (wafers, len(visits), plan.period, plan.times) == (59, 70, 2, tuple(range(70)))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=14))
def test_no_wafer_is_ever_in_two_places(wafers):
    plan = schedule(routed(tuple(Visit(w, (i,)) for i, w in enumerate(wafers)), 5))
    phases = [(v.wafer, t % plan.period) for v, t in zip(plan.visits, plan.times, strict=True)]
    assert len(set(phases)) == len(phases)
    assert plan.period >= np.bincount(wafers).max()
    waits = np.diff(plan.times)
    assert np.all((waits >= 1) & (waits <= plan.period))
    for phase in range(plan.period):
        hops = plan.hops(phase)
        assert len({a for a, _ in hops}) == len({b for _, b in hops}) == len(hops)
        box = plan.inbox(phase)
        assert np.sum(box < plan.period) == len(hops)


def test_a_route_to_a_wafer_that_is_not_there_is_refused():
    with pytest.raises(UserError, match="wafers outside 0 to 1"):
        routed((Visit(0, (0,)), Visit(2, (1,))), 2)


def test_a_route_must_run_what_its_wafers_hold():
    with pytest.raises(UserError, match="once each, in order"):
        routed((Visit(0, (1,)), Visit(1, (0,))), 2).check(2)
