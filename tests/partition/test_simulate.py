"""The simulation, against the closed form, queues worked out by hand, and the engine."""

import numpy as np
import pytest
from support import checkpoint, engine

from jaxwafer.partition.evaluate import evaluate
from jaxwafer.partition.plan import Partition, Visit, circular, routed, uniform
from jaxwafer.partition.problem import Proposal
from jaxwafer.partition.schedule import schedule
from jaxwafer.partition.simulate import Arrival, Line, line_of, simulate, tick_trace
from jaxwafer.pipeline.queue import Sampling

from .problems import layer, problem


def line(services, hop: float = 0.0, servers=None) -> Line:
    """Stations of constant times, whatever the batch; a chunk of n tokens takes n times as long."""
    return Line(
        servers=servers or tuple(range(len(services))),
        service=lambda station, tokens, prefill: services[station] * (tokens if prefill else 1),
        hop=lambda station, tokens: hop,
    )


def test_one_request_takes_the_sum_of_stations_and_hops():
    found = simulate(line([1.0, 2.0], hop=0.5), [Arrival(3.0, 0, 4)], micro_batches=1, micro_batch=1)
    assert found.seconds == 3 + 4 * 4.0 and found.each == (0.25,) and found.first_token == (0.0,)
    assert found.utilisation(2) == pytest.approx([4 / 19, 8 / 19])


def test_the_slowest_station_bounds_a_full_pipeline():
    found = simulate(line([1.0, 2.0, 1.0]), [Arrival(0, 0, 40)] * 4, micro_batches=4, micro_batch=1)
    assert found.steady == pytest.approx(0.5) and found.utilisation(3)[1] > 0.97


def test_prefill_delays_those_who_decode():
    """A prompt of two chunks of three tokens through two stations, beside a request that decodes."""
    alone = simulate(line([1.0, 1.0]), [Arrival(0, 6, 1)], micro_batches=1, micro_batch=1, chunk=3)
    assert alone.first_token == (9.0,)  # 3 + 3 + 3
    both = simulate(line([1.0, 1.0]), [Arrival(0, 0, 5), Arrival(0, 6, 1)], micro_batches=2, micro_batch=1, chunk=3)
    # The first two tokens wait for chunks at either station: 3 and 3 at the second one, before it is free.
    assert both.seconds > 10 and both.tokens == 6
    work = sorted((b.begin, b.end) for b in both.busy if b.server == 0)
    assert all(end <= begin for (_, end), (begin, _) in zip(work, work[1:], strict=False))


def test_a_request_waits_for_a_free_row():
    found = simulate(line([1.0]), [Arrival(0, 0, 3), Arrival(0, 0, 2)], micro_batches=1, micro_batch=1)
    assert found.seconds == 5 and found.first_token == (0.0, 3.0)
    shared = simulate(line([1.0]), [Arrival(0, 0, 3), Arrival(0, 0, 2)], micro_batches=1, micro_batch=2)
    assert shared.tokens == 5 and shared.seconds == 3


PLANS = {
    "uneven": Proposal(partition=Partition(((0, 1, 2), (3,), (4, 5)))),
    "revisits": Proposal(partition=routed((Visit(0, (0, 1)), Visit(1, (2, 3)), Visit(0, (4,)), Visit(2, (5,))), 3)),
    "regions": Proposal(partition=uniform(6, 2), shares=(0.3, 0.3, 0.4, 0.2, 0.3, 0.5)),
    "alone": Proposal(partition=uniform(6, 1)),
}


@pytest.mark.parametrize("name", PLANS)
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_steady_state_is_the_closed_form(name, micro_batch):
    layers = [layer(w, token=1) for w in (50, 20, 40, 30, 10, 60)]
    asked = problem(layers, hidden=5, head_read=7, micro_batch=micro_batch, hardware={"memory_bytes": 1e4})
    plan = evaluate(asked, PLANS[name], name)
    stations = line_of(plan)
    assert plan.speed.in_flight == micro_batch * len(stations.servers)
    arrivals = [Arrival(0, 0, 60)] * plan.speed.in_flight
    found = simulate(stations, arrivals, micro_batches=len(stations.servers), micro_batch=micro_batch)
    assert found.steady == pytest.approx(plan.speed.total, rel=0.02)
    one = simulate(stations, [Arrival(0, 0, 5)], micro_batches=1, micro_batch=1)
    alone = evaluate(problem(layers, hidden=5, head_read=7, hardware={"memory_bytes": 1e4}), PLANS[name], name)
    assert one.each[0] == pytest.approx(alone.speed.estimate)


def test_equal_stations_are_ticks():
    """Without hops and with equal times the simulation is the engine's loop."""
    found = simulate(line([1.0] * 3), [Arrival(0, 0, 4)] * 3, micro_batches=3, micro_batch=1)
    trace = tick_trace(schedule(uniform(3, 3)), [4, 4, 4])
    simulated = np.full_like(trace, -1)
    for work in found.busy:
        simulated[int(work.begin), work.server] = work.micro_batch
    np.testing.assert_array_equal(simulated, trace)


ROUTES = {
    "fewer micro-batches than wafers": (uniform(4, 3), [4, 2]),
    "two laps, more micro-batches than wafers": (circular(4, 2, 2), [5, 4, 2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTES)
def test_the_engine_runs_the_ticks_that_are_simulated(name):
    partition, tokens = ROUTES[name]
    source = checkpoint(num_hidden_layers=4, hidden_size=16, intermediate_size=32, vocab_size=32)
    machine = engine(source, mesh=f"{partition.wafers}x1", partition=partition, micro_batches=len(tokens), burst=64)
    for number, count in enumerate(tokens):
        # The first token comes out of prefill.
        machine.submit([5 + number, 17], Sampling(max_new_tokens=count + 1))
    plan = machine.placement.schedule
    expected = tick_trace(plan, tokens)
    seen, before = [], np.zeros((partition.wafers, plan.period))
    while machine.queue.busy:
        machine.step(rounds=1)
        now = np.asarray(machine.stats.busy_ticks) * np.ones_like(before)
        seen += list((now - before).T)
        before = now
    assert machine.stats.ticks == len(expected)
    np.testing.assert_array_equal(np.array(seen), expected >= 0)
