"""The engine: what it refuses, and how requests end."""

import numpy as np
import pytest
from support import checkpoint, engine, forward, greedy

from jaxwafer.errors import UserError
from jaxwafer.options import Options
from jaxwafer.partition.plan import Partition
from jaxwafer.pipeline.queue import Sampling

PROMPTS = [[5, 17, 3], [99], list(range(1, 18)), [7] * 8]


def finish(machine, *requests):
    while machine.queue.busy:
        machine.step()
    return [r.tokens for r in requests]


@pytest.fixture(scope="module")
def machine():
    """Three rows in flight, eight blocks of 8 tokens, contexts of 32."""
    return engine(micro_batch=3, kv_blocks=8, max_context=32, prefill_chunk=32)


@pytest.fixture(scope="module")
def expected():
    return [greedy(checkpoint(), p, 9) for p in PROMPTS]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"micro_batch": 0}, "micro-batch must be at least 1, not 0"),
        ({"micro_batches": 0}, "micro-batches must be at least 1, not 0"),
        ({"max_context": -5}, "max-context must be at least 1, not -5"),
        ({"block": 0}, "block must be at least 1, not 0"),
        ({"kv_blocks": 0}, "kv-blocks must be at least 1, not 0"),
        ({"prefill_chunk": 0}, "prefill-chunk must be at least 1, not 0"),
        ({"burst": 0}, "burst must be at least 1, not 0"),
        ({"dtype": "f64"}, "unknown compute type 'f64'; choose one of auto, bf16, f32"),
        ({"weights": "int3"}, "unknown weight policy 'int3'"),
        ({"kv_cache": "int4"}, "unknown KV cache format 'int4'"),
        ({"mesh": "4by2"}, "--mesh '4by2' is neither WxC"),
        ({"mesh": "17x1"}, "mesh 17x1 needs 17 devices, but there are 16 cpu devices"),
        ({"max_context": 513}, "max-context 513 is more than the 512 positions the model has"),
        ({"weights": "int4", "mesh": "1x6"}, "o_proj.weight: axis 'heads' of 96 over 6 cores gives 16 inputs a core"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_compiled_or_read(changes, message):
    source = checkpoint()
    with pytest.raises(UserError) as error:
        engine(source, **changes)
    assert message in str(error.value) and not source.reads


def test_the_compute_type_is_that_of_the_platform_unless_given():
    assert [Options().compute_type(p) for p in ("cpu", "gpu", "tpu")] == ["f32", "bf16", "bf16"]
    assert Options(dtype="bf16").compute_type("cpu") == "bf16"


def test_a_partition_for_another_mesh_is_refused():
    with pytest.raises(UserError, match="the partition is for 3 wafers, but the mesh 2x1 has 2"):
        engine(mesh="2x1", partition=Partition(((0, 1), (2,), (3, 4))))


@pytest.mark.parametrize(
    "prompt, new, message",
    [
        ("", 5, "prompt {} is empty"),
        (" \n ", 5, "prompt {} is empty"),
        ([], 5, "prompt {} is empty"),
        ([5, 101], 5, "prompt {} has token ids outside 0 to 100"),
        ([-1], 5, "prompt {} has token ids outside 0 to 100"),
        ([2**40], 5, "prompt {} has token ids outside 0 to 100"),
        ([1.5], 5, "prompt {} is neither a text nor a list of token ids"),
        (["5"], 5, "prompt {} is neither a text nor a list of token ids"),
        ([[5, 6], [7]], 5, "prompt {} is neither a text nor a list of token ids"),
        ([3] * 30, 4, "prompt {} has 30 tokens and may generate 4, but the context holds 32"),
        ([3] * 33, 1, "prompt {} has 33 tokens and may generate 1, but the context holds 32"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused_by_number_and_leaves_nothing_behind(machine, prompt, new, message):
    number, sampling = machine._submitted + 1, Sampling(max_new_tokens=new)
    with pytest.raises(UserError) as error:
        machine.submit(prompt, sampling)
    assert message.format(number) in str(error.value)
    with pytest.raises(UserError) as error:
        list(machine.generate([[4, 5], prompt], sampling))
    assert message.format(number + 1) in str(error.value)
    assert not machine.queue.busy and not machine._streams and machine._submitted == number - 1


def test_as_many_samplings_as_prompts_or_one(machine):
    with pytest.raises(UserError, match="2 prompts need as many samplings, not 1"):
        list(machine.generate([[4], [5]], [Sampling()]))
    assert not machine.queue.busy


def test_a_batch_with_lengths_that_are_no_multiples_of_the_block_is_each_alone(machine, expected):
    """Four prompts of 3, 1, 17 and 8 tokens in three rows, eight blocks of 8."""
    requests = [machine.submit(p, Sampling(max_new_tokens=9)) for p in PROMPTS]
    assert finish(machine, *requests) == expected
    assert [r.finish for r in requests] == ["length"] * 4
    assert machine.queue.blocks.free == 8


def test_one_more_row_needs_no_further_program(machine):
    finish(machine, machine.submit([3, 4], Sampling(max_new_tokens=3)))
    before = machine.programs.compiles
    for rows in (2, 3, 4, 7):
        finish(machine, *(machine.submit([3, 4, n], Sampling(max_new_tokens=3)) for n in range(rows)))
    assert machine.programs.compiles == before


def test_requests_that_need_more_blocks_than_there_are_wait_their_turn(machine, expected):
    """Each may need 4 of the 8 blocks: two run while the third row stays empty."""
    sampling = Sampling(max_new_tokens=9)
    long = [machine.submit([11] * 20 + [n], sampling) for n in range(5)]
    machine.step()
    assert len(machine.queue.running) == 2 and len(machine.queue.waiting) == 3
    tokens = finish(machine, *long)
    assert tokens == [greedy(checkpoint(), [11] * 20 + [n], 9) for n in range(5)]


def test_one_new_token_is_the_prefills_and_decodes_nothing(machine, expected):
    before = machine.stats.decode_tokens, machine.stats.bursts
    request = machine.submit(PROMPTS[0], Sampling(max_new_tokens=1))
    (event,) = machine.step()
    assert (event.tokens, event.text, event.finish) == ([expected[0][0]], f"<{expected[0][0]}>", "length")
    assert request.tokens == expected[0][:1] and not machine.queue.busy
    assert (machine.stats.decode_tokens, machine.stats.bursts) == before


def test_the_events_of_a_request_join_to_its_tokens_and_its_text(machine, expected):
    events = list(machine.generate(PROMPTS, Sampling(max_new_tokens=9)))
    requests = sorted({e.request for e in events}, key=lambda r: r.number)
    assert [r.text for r in requests] == ["".join(f"<{t}>" for t in p) for p in PROMPTS]
    for request, tokens in zip(requests, expected, strict=True):
        own = [e for e in events if e.request is request]
        assert sum((e.tokens for e in own), []) == request.tokens == tokens
        assert "".join(e.text for e in own) == request.output == "".join(f"<{t}>" for t in tokens)
        assert [e.finish for e in own] == [None] * (len(own) - 1) + ["length"]
        assert request.submitted <= request.first_token <= request.finished


def test_a_text_prompt_is_its_tokens(machine, expected):
    request = machine.submit("<5><17><3>", Sampling(max_new_tokens=9))
    assert finish(machine, request) == [expected[0]] and request.text == "<5><17><3>"


@pytest.mark.parametrize("at", [0, 1, 4])
def test_a_stop_text_is_cut_off_and_its_token_kept(machine, expected, at):
    tokens = expected[0]
    first = tokens.index(tokens[at])
    # The last two characters of the token before, where there is one, and the token's own.
    stop = (f"{tokens[first - 1] % 10}>" if first else "") + f"<{tokens[first]}>"
    events = list(machine.generate([PROMPTS[0]], Sampling(max_new_tokens=9, stop=(stop,))))
    request = events[0].request
    assert (request.tokens, request.finish) == (tokens[: first + 1], "stop")
    text = "".join(f"<{t}>" for t in tokens[: first + 1])
    assert "".join(e.text for e in events) == request.output == text[: -len(stop)]


def test_a_stop_text_that_is_never_completed_is_let_go_at_the_end(machine, expected):
    stop = f"<{expected[0][-1]}>!"
    events = list(machine.generate([PROMPTS[0]], Sampling(max_new_tokens=9, stop=(stop,))))
    assert "".join(e.text for e in events) == "".join(f"<{t}>" for t in expected[0])
    assert events[-1].finish == "length"


def test_prompts_of_one_call_may_differ_in_their_sampling(machine, expected):
    each = [Sampling(max_new_tokens=n) for n in (2, 9)]
    requests = {e.request for e in machine.generate(PROMPTS[:2], each)}
    assert {r.number % 2: len(r.tokens) for r in requests} in ({0: 2, 1: 9}, {1: 2, 0: 9})


@pytest.fixture(scope="module")
def ending(expected):
    """End tokens: the fourth of the first prompt's, and one more."""
    source = checkpoint(eos_ids=(expected[0][3], 100))
    return engine(source, micro_batch=3, kv_blocks=8, max_context=32, prefill_chunk=32)


def test_an_end_token_ends_a_request_and_is_no_part_of_it(ending, expected):
    end = expected[0].index(expected[0][3])
    ends = [Sampling(max_new_tokens=9), Sampling(max_new_tokens=9, ignore_eos=True)]
    events = list(ending.generate([PROMPTS[0]] * 2, ends))
    one, other = sorted({e.request for e in events}, key=lambda r: r.number)
    assert (one.tokens, one.finish) == (expected[0][:end], "stop")
    assert one.output == "".join(f"<{t}>" for t in expected[0][:end])
    assert (other.tokens, other.finish) == (expected[0], "length")
    assert ending.queue.blocks.free == 8


def test_an_end_token_may_be_the_first(ending, expected):
    end = expected[0].index(expected[0][3])
    request = ending.submit(PROMPTS[0] + expected[0][:end], Sampling(max_new_tokens=9))
    (event,) = ending.step()
    assert (event.tokens, event.text, event.finish, request.tokens) == ([], "", "stop", [])


@pytest.mark.parametrize(
    "tokens, message",
    [
        ([], "scoring needs at least two tokens"),
        ([5], "scoring needs at least two tokens"),
        ([5, 101], "the text to score has token ids outside 0 to 100"),
        ([-1, 5], "the text to score has token ids outside 0 to 100"),
        ([5] * 34, "34 tokens do not fit the context of 32: raise --max-context"),
    ],
)
def test_what_cannot_be_scored_is_refused(machine, tokens, message):
    with pytest.raises(UserError, match=message):
        machine.score(tokens)
    assert machine.queue.blocks.free == 8


def test_a_score_does_not_take_blocks_from_running_requests(machine):
    requests = [machine.submit([11] * 20 + [n], Sampling(max_new_tokens=9)) for n in range(2)]
    machine.step()
    with pytest.raises(UserError, match="running requests hold the KV cache: let them finish before scoring"):
        machine.score([5, 6, 7])
    finish(machine, *requests)


def test_scores_are_log_probabilities_and_leave_nothing_behind(machine, expected):
    tokens = PROMPTS[2]
    logits = forward(checkpoint(), tokens)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    np.testing.assert_allclose(machine.score(tokens), logs[np.arange(16), tokens[1:]], atol=2e-5)
    assert machine.queue.blocks.free == 8
    assert finish(machine, machine.submit(PROMPTS[0], Sampling(max_new_tokens=9))) == [expected[0]]


def test_the_defaults_are_valid():
    assert Options().mesh == "1x1"
