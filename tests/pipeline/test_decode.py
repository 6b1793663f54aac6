"""The decode loop, tick by tick: what it counts, where it stops, and what it writes.

Hand counts: a prompt's first token comes of its prefill, so `max_new_tokens` of n leave n − 1 to decode; the token at
position p reads ⌈(p + 1)/8⌉ blocks of 8 rows.
"""

import jax
import numpy as np
import pytest
from support import checkpoint, engine, greedy

from jaxwafer.pipeline.queue import Sampling

PROMPT, OTHER = [81, 99, 38], [84, 69, 71]  # whose first tokens all differ
SIZES = dict(num_hidden_layers=4)


def make(mesh: str, *, eos_ids=(), **options):
    source = checkpoint(eos_ids=eos_ids, **SIZES)
    return engine(source, mesh=mesh, max_context=32, prefill_chunk=32, **options)


def run(machine, *requests: tuple[list[int], Sampling]):
    """What one run adds to the counts: (ticks, bursts, busy ticks, tokens, KV rows), and the requests' tokens."""
    stats = machine.stats
    before = [np.array(getattr(stats, n)) for n in ("ticks", "bursts", "busy_ticks", "tokens", "kv_rows")]
    queued = [machine.submit(p, s) for p, s in requests]
    while machine.queue.busy:
        machine.step()
    after = [np.array(getattr(stats, n)) for n in ("ticks", "bursts", "busy_ticks", "tokens", "kv_rows")]
    # A round of the plain ring has one phase.
    counts = (np.reshape(a - b, a.shape[:1]).tolist() for a, b in zip(after, before, strict=True))
    return tuple(counts), [r.tokens for r in queued]


def new(tokens: int, **sampling) -> Sampling:
    return Sampling(max_new_tokens=tokens, **sampling)


@pytest.fixture(scope="module")
def expected():
    source = checkpoint(**SIZES)
    return {tuple(p): greedy(source, p, 9) for p in (PROMPT, OTHER)}


@pytest.fixture(scope="module")
def one():
    """One wafer, one request of which the host sees each fourth token."""
    return make("1x1", burst=4)


def test_one_request_on_one_wafer_takes_a_tick_a_token(one, expected):
    counts, (tokens,) = run(one, (PROMPT, new(9)))
    # Positions 3 to 10: five tokens that read one block, three that read two.
    assert counts == (8, 2, [8.0], [8.0], [5 * 8.0 + 3 * 16.0])
    assert tokens == expected[tuple(PROMPT)]


def test_a_burst_stops_as_soon_as_no_request_is_left(one):
    counts, _ = run(one, (PROMPT, new(4)))
    assert counts == (3, 1, [3.0], [3.0], [3 * 8.0])


def test_no_tick_is_spent_on_what_the_prefill_finished(one):
    counts, _ = run(one, (PROMPT, new(1)))
    assert counts == (0, 0, [0.0], [0.0], [0.0])


@pytest.fixture(scope="module")
def two():
    """Two wafers with a micro-batch each, of which the host sees each token."""
    return make("2x1", burst=1)


def test_a_full_pipeline_has_a_bubble_of_one_tick_a_run(two, expected):
    """Micro-batch 0 enters at ticks 0, 2, 4, 6, micro-batch 1 at 1, 3, 5, 7; the last token leaves at tick 8."""
    counts, tokens = run(two, (PROMPT, new(5)), (OTHER, new(5)))
    assert counts == (9, 5, [8.0, 8.0], [8.0, 8.0], [64.0, 64.0])
    assert tokens == [expected[tuple(PROMPT)][:5], expected[tuple(OTHER)][:5]]


def test_the_round_goes_on_where_the_last_run_stopped(two, expected):
    """Micro-batch 0 alone takes two ticks a token, and one more where the phase has it enter second."""
    first = two._round
    slot = two.queue._free[0]
    wait = (slot[0] - first) % 2
    counts, (tokens,) = run(two, (PROMPT, new(5)))
    assert counts[0] == 2 * 4 + wait and counts[2:] == ([4.0, 4.0], [4.0, 4.0], [32.0, 32.0])
    assert two._round == (first + counts[0]) % 2
    assert tokens == expected[tuple(PROMPT)][:5]


@pytest.mark.parametrize("cut", [0, 1])
def test_the_token_in_flight_of_a_request_that_the_host_ended_is_void(two, expected, cut):
    """Of the request that enters second, the next token is in flight when the host sees the stop text.

    It enters at ticks 1 and 3, then for nothing: wafer 0 works on it twice, wafer 1 once, as the row is void by then.
    Of the one that enters first nothing is in flight at that time.
    """
    two._round = two.queue._free[0][0]
    prompts = [PROMPT, OTHER]
    stop = f"<{expected[tuple(prompts[cut])][1]}>"
    sampling = [new(5), new(5)]
    sampling[cut] = new(5, stop=(stop,))
    counts, tokens = run(two, *zip(prompts, sampling, strict=True))
    assert counts[3] == ([6.0, 5.0] if cut else [5.0, 5.0])
    assert tokens[cut] == expected[tuple(prompts[cut])][:2]
    assert tokens[1 - cut] == expected[tuple(prompts[1 - cut])][:5]
    # The slot's next owner does not see it.
    counts, tokens = run(two, (OTHER, new(9)), (PROMPT, new(9)))
    assert tokens == [expected[tuple(OTHER)], expected[tuple(PROMPT)]] and counts[3] == [16.0, 16.0]


def test_an_end_token_ends_the_row_on_the_device(expected):
    tokens = expected[tuple(PROMPT)]
    machine = make("1x1", eos_ids=(tokens[3],), burst=4)
    at = tokens.index(tokens[3])
    assert at > 0
    counts, got = run(machine, (PROMPT, new(9)))
    assert counts[:4] == (at, 1, [float(at)], [float(at)]) and got == [tokens[:at]]
    counts, got = run(machine, (PROMPT, new(9, ignore_eos=True)))
    assert counts[0] == 8 and got == [tokens]


def test_fewer_micro_batches_than_wafers_leave_bubbles_but_no_pad_work_or_writes(expected):
    """One micro-batch of two rows on three wafers: each token takes three ticks, one of them on each wafer.

    Pad rows, idle ticks, a wafer's empty slots and the last token of each request write nothing.
    """
    machine = make("3x1", micro_batch=2, micro_batches=1, burst=8)
    (_, (tokens,)) = run(machine, (PROMPT, new(9)))
    assert tokens == expected[tuple(PROMPT)]
    rows = np.zeros((3, 2, machine.cache_shape.blocks, 8), bool)
    for wafer, layers in enumerate(machine.placement.partition.layers):
        # Positions 0 to 10 are in the first two blocks.
        rows[wafer, : len(layers), 0] = rows[wafer, : len(layers), 1, :3] = True
    for field in machine._cache[0].values():
        np.testing.assert_array_equal(np.asarray(field.values).any((-2, -1)), rows.reshape(6, -1, 8))

    counts, tokens = run(machine, (PROMPT, new(5)), (OTHER, new(3)))
    # Rows: 4 tokens of one and 2 of the other.
    assert counts == (12, 1, [4.0] * 3, [6.0] * 3, [48.0] * 3)
    assert tokens == [expected[tuple(PROMPT)][:5], expected[tuple(OTHER)][:3]]


def test_more_micro_batches_than_wafers_take_a_period_of_as_many_ticks(expected):
    """Three micro-batches on one wafer: requests in the first two, which enter at ticks 0 and 1, 3 and 4, ..."""
    machine = make("1x1", micro_batches=3, burst=8)
    counts, tokens = run(machine, (PROMPT, new(4)), (OTHER, new(3)))
    assert counts == (7, 1, [5.0], [5.0], [40.0])
    assert tokens == [expected[tuple(PROMPT)][:4], expected[tuple(OTHER)][:3]]


def test_a_donated_cache_stays_where_it_is(one):
    def places():
        return [s.data.unsafe_buffer_pointer() for leaf in jax.tree.leaves(one._cache) for s in leaf.addressable_shards]

    run(one, (PROMPT, new(3)))
    before, arrays = places(), jax.tree.leaves(one._cache)
    run(one, (PROMPT, new(9)))
    assert all(a.is_deleted() for a in arrays) and places() == before
