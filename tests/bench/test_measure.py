"""The benchmark's procedure on a tiny engine, with the ceiling and the clock given."""

import pytest
from support import engine

from jaxwafer.bench import measure as module
from jaxwafer.bench.measure import Point, Spread, measure, once
from jaxwafer.roofline.report import counted

POINT = Point(mesh="2x1", requests=3, micro_batch=2, prompt=5, new=4)


@pytest.fixture(scope="module")
def machine():
    return engine(mesh="2x1", micro_batch=2)


def test_a_spread_is_the_median_and_the_ends():
    assert Spread.of([3.0, 1.0, 10.0]) == Spread(3.0, 1.0, 10.0)


def test_every_run_has_the_same_prompts_to_their_ends(machine):
    first, second = once(machine, POINT), once(machine, POINT)
    assert [r.prompt.tolist() for r in first] == [r.prompt.tolist() for r in second]
    assert {len(r.prompt) for r in first} == {5}
    assert [r.tokens for r in first] == [r.tokens for r in second]
    assert {len(r.tokens) for r in first} == {4}


def test_bytes_are_counted_a_token_and_rates_are_of_the_counted_runs(machine, monkeypatch):
    ceilings = iter((100e9, 80e9))
    monkeypatch.setattr(module, "read_ceiling", lambda mesh: next(ceilings))
    turns = []
    found = measure(machine, POINT, 3, between=lambda: turns.append(machine.stats.decode_tokens))
    # After the warm-up and after each run but the last: 3 requests of 3 tokens in decoding.
    assert turns[1:] == [9, 9]
    assert machine.stats.decode_tokens == 9
    traffic = counted(machine)
    assert found.bytes_per_token == pytest.approx(traffic.bytes / 9)
    assert found.flops_per_token == pytest.approx(traffic.flops / 9)
    assert found.ceiling == (100e9, 80e9) and found.drifted
    assert found.mbu == pytest.approx(found.bytes_per_token * found.decode_tokens_per_s.median / 100e9)
    assert found.decode_tokens_per_s.least <= found.decode_tokens_per_s.median <= found.decode_tokens_per_s.most
    assert found.decode_tokens_per_s.most >= 9 / machine.stats.decode_seconds
