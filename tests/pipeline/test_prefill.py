"""Prefill in chunks: padding counts for nothing and writes nothing."""

import numpy as np
import pytest
from support import checkpoint, engine, greedy

from jaxwafer.pipeline.queue import Sampling

SIZES = dict(num_hidden_layers=3)
ONE = Sampling(max_new_tokens=1)


def written(machine) -> np.ndarray:
    """Which KV rows hold anything, bool [wafers · layers, blocks, block]."""
    return np.asarray(machine._cache[0]["k"].values).any((-2, -1))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed + length).integers(0, 101, length).tolist()


@pytest.fixture(scope="module")
def machine():
    """Two wafers of two cores, the second with a layer less; chunks of 5 and never more than 8 of them a call."""
    return engine(checkpoint(**SIZES), mesh="2x2", micro_batch=4, max_context=64, prefill_chunk=5, kv_blocks=64)


@pytest.fixture(scope="module")
def untouched():
    """As `machine`; for the one test that looks at a cache nobody has used."""
    return engine(checkpoint(**SIZES), mesh="2x2", micro_batch=4, max_context=64, prefill_chunk=5, kv_blocks=64)


def test_a_prompts_rows_are_written_and_no_other_whatever_its_last_chunk_holds(untouched):
    requests = [untouched.submit(prompt(n), ONE) for n in (1, 4, 5, 6, 43)]
    untouched.step()
    expected = np.zeros((2, 2, 64, 8), bool)
    for request in requests:
        position = np.arange(len(request.prompt))
        expected[0, :, request.blocks[position // 8], position % 8] = True
        expected[1, 0, request.blocks[position // 8], position % 8] = True
    np.testing.assert_array_equal(written(untouched), expected.reshape(4, 64, 8))


@pytest.mark.parametrize("length", [1, 4, 5, 6, 10, 39, 40, 41, 50])
def test_the_first_token_follows_the_prompt_around_every_chunk_and_call(machine, length):
    """40 tokens are 8 chunks of 5, a whole call."""
    request = machine.submit(prompt(length), ONE)
    (event,) = machine.step()
    assert event.tokens == greedy(checkpoint(**SIZES), prompt(length), 1) and event.request is request


def test_positions_go_on_from_the_real_length_after_many_padded_prefills(machine):
    """Each prefill is padded to whole chunks; decoding that went on from there would be off."""
    for n in range(9):
        machine.submit(prompt(1 + n, 7), ONE)
    machine.step()
    tokens = prompt(7, 3)
    request = machine.submit(tokens, Sampling(max_new_tokens=8))
    while machine.queue.busy:
        machine.step()
    assert request.tokens == greedy(checkpoint(**SIZES), tokens, 8)


def test_prompts_of_one_call_do_not_mix(machine):
    """Their chunks follow one another through the wafers, several at once."""
    prompts = [prompt(n, 11) for n in (11, 3, 5, 1, 9)]
    requests = [machine.submit(p, ONE) for p in prompts]
    machine.step()
    assert [r.tokens for r in requests] == [greedy(checkpoint(**SIZES), p, 1) for p in prompts]


def test_real_tokens_and_chunks_are_counted(machine):
    before = machine.stats.prefill_tokens, machine.stats.prefill_chunks
    for n in (11, 3, 5, 1):
        machine.submit(prompt(n), ONE)
    machine.step()
    assert machine.stats.prefill_tokens - before[0] == 20
    assert machine.stats.prefill_chunks - before[1] == 3 + 1 + 1 + 1


def test_prompts_of_any_length_take_one_program_a_chunk_length(machine):
    for n in (2, 17, 33):
        machine.submit(prompt(n), ONE)
    machine.step()
    compiled = [key for key in machine.programs._compiled if key[0] == "prefill"]
    assert compiled == [("prefill", 5, False, False)]
