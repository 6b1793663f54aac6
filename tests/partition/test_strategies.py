"""What strategies propose, on chains small enough to try everything."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxwafer.errors import UserError
from jaxwafer.hardware import Fabric
from jaxwafer.partition.capacity import capacity
from jaxwafer.partition.evaluate import evaluate
from jaxwafer.partition.problem import Proposal
from jaxwafer.partition.strategies import NAMES, regions, strategy
from jaxwafer.partition.strategies.packed import _first_fit_decreasing

from .problems import layer, problem

LAYERS = st.lists(st.sampled_from([(40, 0, 2), (40, 3, 0), (10, 0, 2), (25, 1, 1), (60, 2, 0)]), min_size=1, max_size=6)
CONTIGUOUS = ("uniform", "first_fit", "minmax", "kv_aware")


def chain(layers, **fields):
    return problem([layer(w, token=t, state=s) for w, t, s in layers], **fields)


@settings(max_examples=30, deadline=None)
@given(LAYERS, st.integers(1, 3), st.sampled_from(["room", "mesh", "ends"]), st.integers(0, 30))
def test_no_plan_exceeds_memory_and_every_plan_holds_the_requests(layers, requests, vocabulary, size):
    asked = chain(layers, requests=requests, vocabulary=vocabulary, embedding=size, head=size // 2)
    for name in NAMES:
        try:
            proposals = strategy(name)(asked)
        except UserError as error:
            assert "\n" not in str(error)
            continue
        for proposal in proposals:
            plan = evaluate(asked, proposal, name)
            assert plan.requests >= requests
            assert all(w.free >= 0 for w in plan.wafers), (name, plan.wafers)
            vocabulary_bytes = sum(w.vocabulary for w in plan.wafers)
            assert 0 <= vocabulary_bytes - (size + size // 2) < plan.partition.wafers


@settings(max_examples=80, deadline=None)
@given(LAYERS, st.integers(1, 3))
def test_first_fit_uses_fewest_wafers_of_all_contiguous_pipelines(layers, requests):
    asked = chain(layers, requests=requests)
    counts = {name: strategy(name)(asked)[0].partition.wafers for name in CONTIGUOUS}
    assert counts["first_fit"] == counts["minmax"] == counts["kv_aware"] <= counts["uniform"]


def fewest(asked) -> tuple[int, int]:
    """(wafers, visits) of the best placement of all, by trying every one."""
    best = (99, 99)
    for homes in product(range(asked.count), repeat=asked.count):
        if any(h > max(homes[:n], default=-1) + 1 for n, h in enumerate(homes)):
            continue  # the same with wafers renamed
        wafers = max(homes) + 1
        on = [[n for n, h in enumerate(homes) if h == w] for w in range(wafers)]
        if all(asked.fits(layers, asked.least, wafers) for layers in on):
            visits = 1 + sum(a != b for a, b in zip(homes, homes[1:], strict=False))
            best = min(best, (wafers, visits))
    return best


@settings(max_examples=60, deadline=None)
@given(LAYERS, st.integers(1, 2))
def test_packed_is_the_best_of_all_placements(layers, requests):
    asked = chain(layers, requests=requests)
    (found,) = strategy("packed")(asked)
    partition = found.partition
    assert (partition.wafers, len(partition.visits)) == fewest(asked)


def test_a_wafer_is_passed_again_where_that_saves_one():
    (found,) = strategy("packed")(chain([(50, 0, 0), (100, 0, 0), (50, 0, 0)], requests=1))
    assert [(v.wafer, v.layers) for v in found.partition.visits] == [(0, (0,)), (1, (1,)), (0, (2,))]


def test_layers_stay_together_where_changes_cost_nothing_else():
    (found,) = strategy("packed")(chain([(40, 0, 0), (55, 0, 0), (50, 0, 0), (45, 0, 0)], requests=1))
    assert found.partition.layers == ((0, 1), (2, 3)) and not found.partition.route


@settings(max_examples=40, deadline=None)
@given(LAYERS)
def test_first_fit_decreasing_holds_everything(layers):
    asked = chain(layers)
    partition = _first_fit_decreasing(asked, 1, len(layers)).check(len(layers))
    assert all(asked.fits(on, 1, len(layers)) for on in partition.layers)


def test_kv_aware_gives_more_requests_for_more_wafers():
    layers = [(40, 0, 2), (40, 10, 0)] * 3
    proposals = strategy("kv_aware")(chain(layers))
    wafers = [p.partition.wafers for p in proposals]
    requests = [capacity(chain(layers), p).requests for p in proposals]
    # Two layers a wafer leave 20 bytes for 12 a request; one leaves 60 for 10.
    assert (wafers, requests) == ([3, 6], [1, 6])


FABRIC = {"fabric": Fabric(cores=100, hop_s=1e-4, collectives=2)}


def test_the_best_region_is_where_time_is_least():
    asked = chain([(20, 0, 0)], hardware=FABRIC | {"flops": {"bf16": 1e5}, "memory_bytes_per_s": 1e9})
    share = regions.best_share(asked, 0)
    assert 0.01 < share < 1
    one = asked.model.layers[0]
    times = {s: asked.clock.layer(one, 1, 1, s).total for s in np.linspace(0.01, 1, 400)}
    assert min(times, key=times.get) == pytest.approx(share, abs=0.01)


def test_regions_hold_their_layers_and_are_no_more_than_the_wafer():
    asked = chain([(20, 1, 0), (30, 1, 0), (70, 1, 0)], hardware=FABRIC)
    (found,) = strategy("regions")(asked)
    for layers in found.partition.layers:
        shares = [found.shares[n] for n in layers]
        assert sum(shares) == pytest.approx(1) or sum(shares) < 1
        assert all(s * 100 >= asked.weights[n] for s, n in zip(shares, layers, strict=True))
    assert capacity(asked, found).requests >= 1


def test_regions_need_a_fabric():
    with pytest.raises(UserError, match="which toy has not"):
        strategy("regions")(chain([(20, 1, 0)]))


def test_width_tries_powers_of_two_on_the_devices_given():
    proposals = strategy("width")(chain([(30, 1, 0)] * 4, wafers=4))
    assert [(p.partition.wafers, p.cores) for p in proposals] == [(4, 1), (2, 2), (1, 4)]


def test_a_strategy_of_ones_own(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        "from jaxwafer.partition.plan import Partition\n"
        "from jaxwafer.partition.problem import Proposal\n"
        "def propose(problem):\n"
        "    return [Proposal(partition=Partition(tuple((n,) for n in range(problem.count))))]\n"
    )
    (found,) = strategy(str(path))(chain([(1, 0, 0)] * 3))
    assert isinstance(found, Proposal) and found.partition.wafers == 3


@pytest.mark.parametrize(
    "text, message",
    [
        ("def propose(problem): return 1", "must return a list of"),
        ("def propose(problem): return 1 / 0", "propose failed: ZeroDivisionError: division by zero"),
        ("x = 1", "has no function propose"),
        ("import nothing_of_the_kind", "cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_is_wrong_with_a_strategy_of_ones_own(tmp_path, text, message):
    path = tmp_path / "own.py"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        strategy(str(path))(chain([(1, 0, 0)]))


def test_an_unknown_strategy():
    with pytest.raises(UserError, match="there is no strategy 'best'; give all, a Python file or one of: uniform, fi"):
        strategy("best")


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"wafers": 1}, "1 wafers hold 0.0 GB, but toy takes 0.0 GB with 1 requests of 1 tokens: at least 2 wafers"),
        ({"wafers": 2}, "2 wafers are enough for the bytes of toy, but not for its whole layers .*: 3 wafers are"),
        ({"requests": 60}, r"layer 0 \(full\) takes .* but a wafer of 1 x toy has .*: give --cores 2 or more"),
        ({"wafers": 0}, "--wafers must be at least 1, not 0"),
        ({"vocabulary": "far"}, "unknown --vocabulary 'far'; choose one of room, mesh, ends"),
        ({"max_context": 4, "context": 5}, "--context 5 is more than the 4 positions that toy has"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(fields, message):
    with pytest.raises(UserError, match=message):
        strategy("first_fit")(chain([(60, 1, 0)] * 3, **fields))
