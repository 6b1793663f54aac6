"""Memory, requests and speed of plans, worked out by hand."""

import pytest

from jaxwafer.hardware import Constants
from jaxwafer.partition.evaluate import evaluate, pareto, prefill, speed, sweep
from jaxwafer.partition.plan import Partition, Visit, routed, uniform
from jaxwafer.partition.problem import Proposal
from jaxwafer.partition.target import fewest, needed_bandwidth

from .problems import layer, problem

# A layer of 50 bytes and as many elements: 50 ms of bandwidth, 10 ms of compute on a device.
HEAVY = {"memory_bytes": 1000.0}


def plan(asked, partition: Partition, **fields):
    return evaluate(asked, Proposal(partition=partition, **fields), "own")


def test_memory_of_each_wafer():
    found = plan(problem([layer(30, token=4), layer(20, state=5), layer(50, token=1)], context=3), uniform(3, 2))
    first, second = found.wafers
    # 50 bytes left for 12 + 5 a request; 50 for 3.
    assert (found.requests, found.capacity.wafer, found.capacity.binds) == (2, 0, "KV")
    assert (first.weights, first.kv, first.state, first.free) == (50, 24, 10, 16)
    assert (second.kinds, second.weights, second.kv, second.free) == ("1 full", 50, 6, 44)
    assert (found.capacity.kv_limit, found.capacity.state_limit) == (4, 10)
    # On wafer 0 KV outgrows state from two tokens on: 4 a token against 5.
    assert found.capacity.crossover == 2


def test_the_vocabulary_goes_where_there_is_room_and_binds_where_there_is_none():
    layers = [layer(60, token=10), layer(20, token=1)]
    found = plan(problem(layers, embedding=30, head=20), uniform(2, 2))
    assert [w.vocabulary for w in found.wafers] == [0, 50] and found.requests == 4
    tight = plan(problem(layers, embedding=60, head=40), uniform(2, 2))
    # 20 bytes are left in all, and a request takes 11.
    assert (tight.requests, tight.capacity.binds) == (1, "vocab")
    assert sum(w.vocabulary for w in tight.wafers) == 100 and all(w.free >= 0 for w in tight.wafers)
    even = plan(problem(layers, embedding=30, head=20, vocabulary="mesh"), uniform(2, 2))
    assert [w.vocabulary for w in even.wafers] == [25, 25] and even.requests == 1
    ends = plan(problem(layers, embedding=30, head=20, vocabulary="ends"), uniform(2, 2))
    assert [w.vocabulary for w in ends.wafers] == [30, 20] and ends.requests == 1


def test_a_tokens_time_is_its_layers_and_changes_of_wafers():
    asked = problem([layer(50)] * 4, hidden=50, hardware=HEAVY)
    found = plan(asked, uniform(4, 2)).speed
    # A hop is 10 ms and 100 bytes at 10 kB/s.
    assert found.hops == pytest.approx(2 * 0.02)
    assert 1 / found.estimate == pytest.approx(4 * 0.05 + 0.04) and found.binds == "memory"
    assert (1 / found.bandwidth_roof, 1 / found.compute_roof) == pytest.approx((0.2, 0.04))
    assert plan(asked, uniform(4, 1)).speed.hops == 0
    back = routed((Visit(0, (0,)), Visit(1, (1, 2)), Visit(0, (3,))), 2)
    assert plan(asked, back).changes == 3 and plan(asked, back).speed.hops == pytest.approx(3 * 0.02)


def test_all_requests_are_bounded_by_what_is_in_flight_and_by_the_slowest_stage():
    asked = problem([layer(50, token=1)] * 3, hardware=HEAVY | {"hop_s": 0.0})
    proposal = Proposal(partition=Partition(((0, 1), (2,))))
    # A token takes about 150 ms, the slowest stage 100 ms.
    one, two = (speed(asked, proposal, n, 1) for n in (1, 2))
    assert one.total == pytest.approx(1 / 0.153) and two.total == pytest.approx(1 / 0.102)
    assert two.each == pytest.approx(two.total / 2)
    more = speed(asked, proposal, 100, 4)
    assert more.in_flight == 8 and more.total == pytest.approx(4 / (2 * 0.054))


def test_constants_correct_the_roofs():
    constants = Constants(
        basis="none", date="", bandwidth_efficiency=0.5, compute_efficiency=0.5, layer_s=0.01, collective_s=0.002,
        link_efficiency=0.5, overhead=2.0,
    )  # fmt: skip
    asked = problem([layer(50)], hidden=100, constants=constants, cores=2, hardware=HEAVY)
    found = plan(asked, uniform(1, 1)).speed
    # 25 bytes a device at half rate; two sums of 2 ms and 200 · 2 · 1/2 bytes at half of 10 kB/s; four of the head's.
    assert 1 / found.estimate == pytest.approx(2 * (0.05 + 2 * (0.002 + 0.04) + 0.01 + 4 * 0.002))
    assert found.binds == "overhead" and 1 / found.bandwidth_roof == pytest.approx(0.025)


def test_the_head_is_read_by_all_wafers_or_by_one():
    layers = [layer(10)] * 2
    fields = {"head": 40, "head_read": 40, "hardware": {"hop_s": 0.0}}
    shared = plan(problem(layers, vocabulary="mesh", **fields), uniform(2, 2)).speed
    last = plan(problem(layers, vocabulary="ends", **fields), uniform(2, 2)).speed
    assert (1 / shared.estimate, 1 / last.estimate) == pytest.approx((0.04, 0.06))


def test_regions_are_stages_of_their_own():
    asked = problem([layer(10, token=1)] * 2, hardware={"hop_s": 0.0})
    found = plan(asked, uniform(2, 1), shares=(0.25, 0.75))
    # Of 100 bytes 25 and 75, of which 10 are weights each.
    assert found.requests == 15 and found.capacity.binds == "KV"
    assert 1 / found.speed.estimate == pytest.approx(0.011 / 0.25 + 0.011 / 0.75)
    assert found.speed.in_flight == 2 and found.speed.total == pytest.approx(1 / 0.044)


def test_pareto_points_are_not_outdone():
    assert pareto([(1, 5), (2, 4), (2, 3), (3, 1), (0, 0), (1, 5)]) == {0, 1, 3, 5}


def test_the_sweep_trades_each_for_all():
    asked = problem([layer(50, token=1)] * 2, hardware=HEAVY)
    rows = sweep(plan(asked, uniform(2, 2)))
    assert [s.micro_batch for s, _ in rows] == list(range(1, 101))
    best = [s for s, marked in rows if marked]
    assert best[0].micro_batch == 1 and len(best) > 10
    assert all(a.each > b.each and a.total < b.total for a, b in zip(best, best[1:], strict=False))


def test_prefill_runs_chunks_through_the_stages():
    asked = problem([layer(50)] * 2, hardware=HEAVY | {"hop_s": 0.0})
    found = plan(asked, uniform(2, 2))
    # A chunk of two tokens still reads 50 bytes a layer; four chunks, two stages.
    assert prefill(found, 8, chunk=2) == pytest.approx(5 * 0.05)
    # One of 1000 computes for 10 s a layer.
    assert prefill(found, 1000, chunk=1000) == pytest.approx(20.0)


def test_the_fewest_devices_for_a_target():
    asked = problem([layer(50, token=1)] * 4, hardware={"hop_s": 0.0})
    # 204 bytes a token take 0.204 s on a device; layers must be split to be faster.
    assert fewest(asked, 4.0).cores == 1
    wide = fewest(asked, 15.0)
    assert wide.cores == 4 and wide.speed.estimate == pytest.approx(4 / 0.204)
    assert needed_bandwidth(asked, 15.0) == pytest.approx(204 * 15)
