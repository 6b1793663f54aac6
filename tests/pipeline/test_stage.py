"""Slots of a stage: which repeat, which branch, and what a branch that is not taken leaves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxwafer.layers.residual import add
from jaxwafer.ops.step import Step
from jaxwafer.partition.placement import SlotTable
from jaxwafer.pipeline.stage import Segment, Stage, choices, segments, total


@pytest.mark.parametrize(
    "pattern, expected",
    [
        ("", []),
        ("a", [Segment(0, 1, 1)]),
        ("aaab", [Segment(0, 1, 3), Segment(3, 1, 1)]),
        # Three linear layers to one of full attention, a remainder of two.
        ("aaabaaabaaabaa", [Segment(0, 4, 3), Segment(12, 1, 2)]),
        ("baaabaaab", [Segment(0, 4, 2), Segment(8, 1, 1)]),
        ("abab", [Segment(0, 2, 2)]),
        ("abcabc", [Segment(0, 3, 2)]),
        ("abc", [Segment(0, 1, 1), Segment(1, 1, 1), Segment(2, 1, 1)]),
    ],
)
def test_slots_of_the_same_pattern_are_one_segment(pattern, expected):
    assert segments(pattern) == expected


def test_a_period_longer_than_the_longest_is_not_looked_for():
    assert segments("abcabc", longest=2) == [Segment(n, 1, 1) for n in range(6)]


@given(st.text("abc", max_size=40), st.integers(1, 8))
def test_segments_cover_every_slot_once_with_its_own_kind(pattern, longest):
    covered = []
    for s in segments(pattern, longest):
        assert s.start == len(covered) and 1 <= s.period <= longest
        covered += list(pattern[s.start : s.start + s.period]) * s.repeats
    assert "".join(covered) == pattern


def test_choices_of_a_slot_are_the_stacks_of_all_wafers():
    stack = np.array([[0, 0, 1], [0, 1, -1], [0, 0, -1]], np.int32)
    assert choices(SlotTable(stack=stack, position=np.zeros_like(stack))) == [(0,), (0, 1), (-1, 1)]


def stage(gated: bool) -> Stage:
    return Stage(placement=None, phase=None, ops=None, weights={}, tables={}, gated=gated)


def switch(stacks, here: int, *, gated: bool = False, count=(1, 0)):
    """Results of branches that give their stack's number plus one times x."""
    branches = {s: (lambda x, s=s: {"y": (s + 1) * x}) for s in stacks if s >= 0}
    zero = jnp.zeros(len(count), jnp.int32)
    step = Step(start=zero, count=jnp.asarray(count, jnp.int32), table=zero[:, None], slot=zero)

    def run(here, x):
        return stage(gated)._switch(stacks, here, step, branches, {s: (x,) for s in branches})

    got = jax.jit(run)(jnp.int32(here), jnp.ones(2))
    return {s: np.asarray(r["y"]).tolist() for s, r in got.items()}


def test_one_kind_everywhere_does_not_branch():
    step = Step(start=jnp.zeros(1), count=jnp.zeros(1), table=jnp.zeros((1, 1)), slot=jnp.zeros(1))
    assert stage(False)._switch((2,), None, step, {2: lambda x: x + 1}, {2: (1,)}) == {2: 2}


@pytest.mark.parametrize(
    "stacks, here, expected",
    [
        ((0, 1), 0, {0: [1, 1], 1: [0, 0]}),
        ((0, 1), 1, {0: [0, 0], 1: [2, 2]}),
        ((0, 2, 5), 2, {0: [0, 0], 2: [3, 3], 5: [0, 0]}),
        ((0, 2, 5), 5, {0: [0, 0], 2: [0, 0], 5: [6, 6]}),
        ((-1, 1), 1, {1: [2, 2]}),
        ((-1, 1), -1, {1: [0, 0]}),
        ((-1,), -1, {}),
    ],
)
def test_a_wafer_runs_its_own_stack_and_the_others_give_zero(stacks, here, expected):
    assert switch(stacks, here) == expected


@pytest.mark.parametrize("stacks, here", [((0,), 0), ((0, 1), 1), ((-1, 1), 1)])
def test_a_gated_stage_skips_a_micro_batch_of_pad_rows_alone(stacks, here):
    own = [here + 1.0] * 2
    assert switch(stacks, here, gated=True, count=(0, 1))[here] == own
    assert not any(any(r) for r in switch(stacks, here, gated=True, count=(0, 0)).values())


def test_partial_sums_of_all_stacks_add_to_the_residual_in_its_own_dtype():
    x = jnp.ones((1, 2), jnp.bfloat16)
    parts = {0: jnp.full((1, 2), 0.5), 1: jnp.full((1, 2), 1.0)}
    got = add(x, total(parts.values(), x))
    assert got.dtype == jnp.bfloat16 and np.asarray(got).astype(float).tolist() == [[2.5, 2.5]]
    assert np.asarray(total([], x)).tolist() == [[0.0, 0.0]]
