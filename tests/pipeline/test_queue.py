"""Requests on the host."""

import numpy as np
import pytest

from jaxwafer.cache.blocks import BlockAllocator
from jaxwafer.errors import UserError
from jaxwafer.pipeline.programs import Sizes
from jaxwafer.pipeline.queue import Queue, Request, Sampling, chunk_length, chunks_of


def sizes(**changes) -> Sizes:
    base = dict(micro_batches=2, batch=2, blocks=4, burst=8, chunks=3, chunk_tokens=(4, 16), eos=1)
    return Sizes(**(base | changes))


def request(number: int, tokens: int, new: int = 4, **sampling) -> Request:
    prompt = np.arange(tokens, dtype=np.int32) + 100 * number
    return Request(number, f"prompt {number}", prompt, Sampling(max_new_tokens=new, **sampling))


def queue(blocks: int = 16, **changes) -> Queue:
    return Queue(sizes(**changes), BlockAllocator(blocks, 8), 32)


def running(filled: Queue, *requests: Request) -> Queue:
    """With each request past its prefill."""
    for r in requests:
        filled.submit(r)
    for r in filled.admit():
        r.tokens.append(7 + r.number)
    return filled


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"temperature": -0.1}, "temperature must be a number from 0 up, not -0.1"),
        ({"temperature": float("nan")}, "temperature must be a number from 0 up, not nan"),
        ({"temperature": float("inf")}, "temperature must be a number from 0 up, not inf"),
        ({"top_k": -1}, "top-k must be 0 (off) or more, not -1"),
        ({"top_k": 2**31}, "top-k must be 0 (off) or more"),
        ({"top_p": 0.0}, "top-p must be above 0 and at most 1, not 0.0"),
        ({"top_p": 1.01}, "top-p must be above 0 and at most 1, not 1.01"),
        ({"top_p": float("nan")}, "top-p must be above 0 and at most 1, not nan"),
        ({"min_p": 1.5}, "min-p must be from 0 to 1, not 1.5"),
        ({"seed": -1}, "seed must be from 0 to 2^32 - 1, not -1"),
        ({"seed": 2**32}, "seed must be from 0 to 2^32 - 1"),
        ({"max_new_tokens": 0}, "max-new-tokens must be at least 1, not 0"),
        ({"stop": ("a", "")}, "a stop text must not be empty"),
        ({"stop": "END"}, "stop must be a list of texts, not 'END'"),
        ({"stop": (5,)}, "stop must be a list of texts, not (5,)"),
    ],
)
def test_sampling_that_means_nothing_is_refused_by_name(changes, message):
    with pytest.raises(UserError) as error:
        Sampling(**changes)
    assert message in str(error.value)


def test_the_last_sampled_token_needs_no_room():
    assert request(0, 5, 1).capacity == 5 and request(0, 5, 4).capacity == 8


@pytest.mark.parametrize(
    "blocks, prompt, new, fits", [(16, 29, 4, True), (16, 30, 4, False), (2, 13, 4, True), (2, 14, 4, False)]
)
def test_a_request_that_could_never_fit_is_refused_at_once(blocks, prompt, new, fits):
    """A context of 32 tokens, or as many as there are blocks for at all."""
    filled = queue(blocks)
    if fits:
        filled.submit(request(0, prompt, new))
        assert filled.busy and len(filled.admit()) == 1
    else:
        with pytest.raises(
            UserError, match=f"prompt 1 has {prompt} tokens and may generate {new}, but the context holds"
        ):
            filled.submit(request(0, prompt, new))
        assert not filled.busy


def test_a_context_that_is_no_whole_number_of_blocks_is_not_rounded_up():
    filled = Queue(sizes(), BlockAllocator(16, 8), 30)
    filled.submit(request(0, 27, 4))
    with pytest.raises(UserError, match="the context holds 30"):
        filled.submit(request(1, 28, 4))


def test_rows_are_filled_across_micro_batches_first():
    filled = running(queue(), *(request(n, 3) for n in range(5)))
    assert [r.slot for r in filled.running.values()] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert len(filled.waiting) == 1


def test_requests_wait_for_blocks_in_order_of_arrival():
    """The first waits for three blocks; the second would fit, but does not overtake."""
    filled = running(queue(4), request(0, 12))
    filled.submit(request(1, 20))
    filled.submit(request(2, 3))
    assert filled.admit() == [] and filled.blocks.free == 2
    filled.finish(filled.running[0, 0], "length")
    assert [r.number for r in filled.admit()] == [1, 2] and filled.blocks.free == 0


def test_a_finished_request_frees_its_slot_and_blocks_and_voids_its_row():
    filled = running(queue(), request(0, 3), request(1, 3))
    assert filled.take_fresh().all()  # at first every row is new
    assert not filled.take_fresh().any()
    first = filled.running[0, 0]
    filled.finish(first, "stop")
    assert first.finish == "stop" and filled.blocks.free == 15 and (0, 0) not in filled.running
    np.testing.assert_array_equal(filled.take_fresh(), [[True, False], [False, False]])
    running(filled, request(2, 3), request(3, 3), request(4, 3))
    # Freed last, used last.
    assert filled.running[0, 0].number == 4
    np.testing.assert_array_equal(filled.take_fresh(), [[True, True], [False, True]])


def test_what_the_loop_sees_of_running_requests():
    filled = running(queue(), request(0, 5, 4), request(1, 3, 9, ignore_eos=True))
    filled.running[1, 0].tokens.append(55)
    got = filled.requests()
    np.testing.assert_array_equal(got.token, [[7, 0], [55, 0]])
    np.testing.assert_array_equal(got.position, [[5, 0], [4, 0]])
    np.testing.assert_array_equal(got.remaining, [[3, 0], [7, 0]])
    np.testing.assert_array_equal(got.ends, [[True, True], [False, True]])


def test_the_tables_are_copies_and_old_blocks_are_gone_from_them():
    filled = running(queue(), request(0, 20, temperature=0.5, seed=9))
    slots = filled.slots(np.array([1]), np.zeros((2, 2), bool))
    owned = filled.running[0, 0].blocks.tolist()
    assert slots.table[0, 0].tolist() == owned + [0] and len(owned) == 3
    assert (slots.sampling.temperature[0, 0], slots.sampling.seed[0, 0]) == (0.5, 9)
    filled.finish(filled.running[0, 0], "length")
    running(filled, *(request(n, 1, 1) for n in range(1, 5)))
    again = filled.slots(np.array([1]), np.zeros((2, 2), bool))
    assert again.table[0, 0].tolist() == filled.running[0, 0].blocks.tolist() + [0, 0, 0]
    assert again.sampling.temperature[0, 0] == 0 and slots.table[0, 0].tolist() == owned + [0]


def test_filters_are_needed_only_while_a_request_samples():
    filled = running(queue(), request(0, 3), request(1, 3, temperature=0.1))
    assert filled.filters
    filled.finish(filled.running[1, 0], "length")
    assert not filled.filters


@pytest.mark.parametrize("longest, length", [(1, 4), (4, 4), (5, 16), (16, 16), (17, 16), (1000, 16)])
def test_the_shortest_chunk_that_holds_the_prompt_is_taken(longest, length):
    assert chunk_length(longest, (4, 16)) == length


def test_prompts_are_cut_into_chunks_with_real_counts_not_padded_ones():
    """Prompts of 9, 4 and 1 tokens in chunks of 4, three a call."""
    filled = running(queue(), request(0, 9), request(1, 4), request(2, 1, temperature=0.7))
    work = list(filled.running.values())
    calls = list(chunks_of(work, sizes(), 4))
    assert len(calls) == 2
    (first, part, ends), (second, rest, last) = calls
    assert [(r.number, start) for r, start in part] == [(0, 0), (0, 4), (0, 8)]
    assert [r and r.number for r in ends] == [None, None, 0]
    np.testing.assert_array_equal(first.tokens, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 0, 0, 0]])
    np.testing.assert_array_equal(first.start, [0, 4, 8])
    np.testing.assert_array_equal(first.count, [4, 4, 1])
    assert [(r.number, start) for r, start in rest] == [(1, 0), (2, 0)]
    assert [r.number for r in last] == [1, 2]
    np.testing.assert_array_equal(second.count, [4, 1, 0])
    np.testing.assert_array_equal(second.tokens, [[100, 101, 102, 103], [200, 0, 0, 0], [0] * 4])
    np.testing.assert_array_equal(second.table[1], [*work[2].blocks, 0, 0, 0])
    np.testing.assert_allclose(second.sampling.temperature, [0, 0.7, 0])
    assert second.targets is None
