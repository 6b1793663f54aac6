"""Which layers each wafer holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxwafer.errors import UserError
from jaxwafer.partition.plan import Partition, uniform


@pytest.mark.parametrize(
    "count, wafers, sizes",
    [(30, 4, [8, 8, 7, 7]), (5, 1, [5]), (4, 4, [1, 1, 1, 1]), (2, 5, [1, 1, 0, 0, 0]), (93, 59, [2] * 34 + [1] * 25)],
)
def test_layers_are_dealt_evenly_and_the_first_wafers_take_the_rest(count, wafers, sizes):
    assert [len(w) for w in uniform(count, wafers).layers] == sizes


@given(st.integers(1, 200), st.integers(1, 80))
def test_every_layer_is_on_one_wafer_in_order(count, wafers):
    partition = uniform(count, wafers)
    assert partition.wafers == wafers and partition.check(count) is partition
    sizes = [len(w) for w in partition.layers]
    assert max(sizes) - min(sizes) <= 1 and sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize("layers", [((0, 1), (3,)), ((0, 1), (1, 2)), ((1, 0), (2,)), ((2,), (0, 1)), ((0, 1, 2, 3),), ()])
def test_a_layer_left_out_repeated_or_out_of_order_is_refused(layers):
    with pytest.raises(UserError, match="must hold layers 0 to 2 once each, in order"):
        Partition(layers).check(3)


def test_wafers_without_layers_are_allowed_anywhere():
    Partition(((), (0, 1), (), (2,), ())).check(3)
