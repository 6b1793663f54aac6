"""Cuts of a chain, against every cut there is."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxwafer.partition.chain import cut, fastest, roomiest, run_sums

from .problems import layer, problem

LAYERS = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=7)


def cuts(count: int, wafers: int):
    """Every way to cut `count` layers into as many runs as wafers, or into single layers where there are fewer."""
    for places in combinations(range(1, count), min(wafers, count) - 1):
        ends = (0, *places, count)
        yield [range(a, b) for a, b in zip(ends, ends[1:], strict=False)]


def chain(layers, **fields):
    return problem([layer(w, token=t, state=s) for w, t, s in layers], **fields)


def test_run_sums():
    np.testing.assert_array_equal(run_sums(np.array([2, 3, 5]))[[0, 0, 1], [1, 3, 3]], [2, 10, 8])


def test_the_slowest_run_of_a_hand_made_chain():
    worst, partition = cut(
        np.where(run_sums(np.array([4.0, 1, 1, 4])) > 0, run_sums(np.array([4.0, 1, 1, 4])), np.inf), 2
    )
    assert worst == 5 and partition.layers == ((0, 1), (2, 3))


def test_more_wafers_than_layers_stay_empty():
    _, partition = cut(np.where(run_sums(np.ones(2)) > 0, run_sums(np.ones(2)), np.inf), 4)
    assert partition.layers == ((0,), (1,), (), ())


@settings(max_examples=150, deadline=None)
@given(LAYERS, st.integers(1, 8), st.integers(1, 4), st.sampled_from([None, 1, 2]))
def test_fastest_is_the_best_of_all_cuts(layers, wafers, requests, most):
    asked = chain(layers, most_layers=most)
    good = [c for c in cuts(len(layers), wafers) if all(asked.fits(run, requests, wafers) for run in c)]
    found = fastest(asked, wafers, requests)
    if not good:
        assert found is None
        return
    times = [max(asked.seconds[list(run)].sum() for run in c) for c in good]
    assert max(asked.seconds[list(run)].sum() for run in found.layers) == pytest.approx(min(times))
    assert all(asked.fits(run, requests, wafers) for run in found.layers)


@settings(max_examples=150, deadline=None)
@given(LAYERS, st.integers(1, 8))
def test_roomiest_is_the_best_of_all_cuts(layers, wafers):
    asked = chain(layers)

    def holds(run) -> float:
        left = 100 - asked.weights[list(run)].sum()
        each = asked.request_bytes[list(run)].sum()
        return -1 if left < 0 else (left // each if each else 1e15)

    best = max(min(holds(run) for run in c) for c in cuts(len(layers), wafers))
    assert roomiest(asked, wafers) == best


@settings(max_examples=60, deadline=None)
@given(LAYERS)
def test_more_wafers_never_make_the_slowest_slower(layers):
    asked = chain(layers)
    slowest = []
    for wafers in range(1, len(layers) + 3):
        found = fastest(asked, wafers, 1)
        slowest.append(np.inf if found is None else max(asked.seconds[list(run)].sum() for run in found.layers))
    assert all(b <= a + 1e-12 for a, b in zip(slowest, slowest[1:], strict=False))
