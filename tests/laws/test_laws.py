"""The seven laws of docs/architecture.md, on a tiny Llama of awkward sizes."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import checkpoint, engine, forward, greedy

from jaxwafer.partition.plan import Partition, Visit, circular, routed
from jaxwafer.pipeline.queue import Sampling

PROMPTS = [[5, 17, 3], [99], list(range(1, 40)), [7] * 8, [4, 4, 2, 60, 61], list(range(60, 76)), [88, 1]]


def run(machine, prompts, sampling=None):
    """Tokens of each prompt, all submitted at once."""
    sampling = sampling or Sampling(max_new_tokens=9)
    requests = [machine.submit(p, sampling) for p in prompts]
    while machine.queue.busy:
        machine.step()
    return [r.tokens for r in requests]


@pytest.fixture(scope="module")
def expected():
    return [greedy(checkpoint(), p, 9) for p in PROMPTS]


@pytest.mark.parametrize(
    "mesh, micro_batch, micro_batches",
    [("1x1", 1, 1), ("1x1", 3, 2), ("1x2", 2, None), ("2x1", 1, None), ("4x2", 2, None), ("4x2", 1, 1), ("3x2", 2, 5),
     ("1x4", 1, None), ("2x5", 1, None), ("7x1", 1, None)],
)  # fmt: skip
def test_law_1_any_mesh_gives_the_tokens_of_one_device(mesh, micro_batch, micro_batches, expected):
    machine = engine(mesh=mesh, micro_batch=micro_batch, micro_batches=micro_batches)
    assert run(machine, PROMPTS) == expected


@pytest.mark.parametrize(
    "split", [((0,), (1, 2, 3, 4)), ((), (0, 1, 2), (3, 4)), ((0, 1), (), (2, 3, 4), ()), ((0, 1, 2, 3, 4),)]
)
def test_law_1_holds_for_any_partition(split, expected):
    machine = engine(mesh=f"{len(split)}x1", partition=Partition(split), micro_batch=2)
    assert run(machine, PROMPTS) == expected


ROUTES = {
    "circular": circular(5, 2, 2),
    "there and back": routed((Visit(0, (0, 1)), Visit(1, (2,)), Visit(0, (3,)), Visit(2, (4,))), 3),
    "three visits": routed((Visit(1, (0,)), Visit(0, (1,)), Visit(1, (2,)), Visit(2, (3,)), Visit(1, (4,))), 3),
    "twice in a row": routed((Visit(1, (0,)), Visit(1, (1, 2)), Visit(0, (3, 4))), 2),
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("micro_batches", [1, None, 7])
def test_law_1_holds_for_routes_that_visit_a_wafer_again(route, micro_batches, expected):
    partition = ROUTES[route]
    machine = engine(mesh=f"{partition.wafers}x1", partition=partition, micro_batches=micro_batches)
    assert run(machine, PROMPTS) == expected


@pytest.mark.parametrize("form", ["int4", "int4-min", "int8-g32", "int8", "fp8", "bf16"])
def test_law_1_holds_for_every_weight_format(form):
    source = checkpoint(form=form)
    alone = run(engine(source), PROMPTS)
    assert run(engine(source, mesh="2x2", micro_batch=2), PROMPTS) == alone


@pytest.mark.parametrize("chunk", [1, 7, 8, 64])
def test_law_2_prefill_in_one_chunk_or_many_gives_the_same_logits(chunk):
    source = checkpoint()
    tokens = np.random.default_rng(1).integers(0, 101, 70).tolist()
    logits = forward(source, tokens)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    expected = expected[np.arange(69), tokens[1:]]
    machine = engine(source, mesh="2x2", prefill_chunk=chunk)
    np.testing.assert_allclose(machine.score(tokens), expected, atol=2e-5)


@pytest.mark.parametrize("chunk", [3, 64])
def test_law_2_the_cache_does_not_depend_on_the_chunks(chunk):
    prompt = np.random.default_rng(2).integers(0, 101, 50).tolist()
    whole, pieces = (engine(prefill_chunk=c, micro_batches=1) for c in (64, chunk))
    tokens = [run(m, [prompt], Sampling(max_new_tokens=1))[0] for m in (whole, pieces)]
    assert tokens[0] == tokens[1]
    for one, other in zip(jax.tree.leaves(whole._cache), jax.tree.leaves(pieces._cache), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), atol=1e-5)


@pytest.fixture(scope="module")
def shared():
    """Two wafers of two cores with few slots, so that slots and blocks are reused all the time."""
    return engine(mesh="2x2", micro_batch=2, kv_blocks=40, prefill_chunk=32)


@pytest.fixture(scope="module")
def alone():
    return engine(mesh="1x1")


@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 20), st.integers(0, 2**31)), min_size=1, max_size=9),
    st.sampled_from([0.0, 0.8]),
)
def test_law_3_a_request_does_not_depend_on_its_neighbours_or_its_slot(shared, alone, shapes, temperature):
    prompts = [np.random.default_rng(s).integers(0, 101, length).tolist() for length, _, s in shapes]
    each = [Sampling(max_new_tokens=n, temperature=temperature, top_p=0.9, seed=s) for _, n, s in shapes]
    requests = [shared.submit(p, s) for p, s in zip(prompts, each, strict=True)]
    while shared.queue.busy:
        shared.step()
    for request, prompt, sampling in zip(requests, prompts, each, strict=True):
        assert request.tokens == run(alone, [prompt], sampling)[0]
    assert shared.queue.blocks.free == shared.queue.blocks.count


def test_law_3_a_request_cut_short_leaves_nothing_behind(shared, alone):
    """A stop text ends a request while its next token is in flight; the slot's next owner must not see it."""
    prompts = [[i, i + 1, i + 2] for i in range(12)]
    plain = [run(alone, [p])[0] for p in prompts]
    stops = [Sampling(max_new_tokens=9, stop=(f"<{t[2]}>",) if i % 2 else ()) for i, t in enumerate(plain)]
    requests = [shared.submit(p, s) for p, s in zip(prompts, stops, strict=True)]
    while shared.queue.busy:
        shared.step()
    for i, (request, tokens) in enumerate(zip(requests, plain, strict=True)):
        if i % 2:
            end = tokens.index(tokens[2]) + 1
            assert (request.tokens, request.finish) == (tokens[:end], "stop")
        else:
            assert (request.tokens, request.finish) == (tokens, "length")


@pytest.mark.parametrize("policy", ["native", "mixed", "int4", "fp8", "int8", "bf16", "f32"])
@pytest.mark.parametrize("mesh", ["1x1", "3x2", "2x5"])
def test_law_4_bytes_by_declaration_are_the_bytes_on_devices(policy, mesh):
    machine = engine(checkpoint(form="int4-min"), mesh=mesh, weights=policy, kv_cache="fp8")
    on_device = {d: 0 for d in machine.mesh.devices.flat}
    for leaf in jax.tree.leaves(machine.weights):
        for shard in leaf.addressable_shards:
            on_device[shard.device] += shard.data.nbytes
    for wafer in machine.mesh.devices:
        assert sum(on_device[d] for d in wafer) == machine.placement.allocated_bytes
    cache = dict.fromkeys(on_device, 0)
    for leaf in jax.tree.leaves(machine._cache):
        for shard in leaf.addressable_shards:
            cache[shard.device] += shard.data.nbytes
    for wafer in machine.mesh.devices:
        assert sum(cache[d] for d in wafer) == machine.cache_shape.blocks * machine.cache_shape.block_bytes
    needed = [machine.placement.weight_bytes(w) for w in range(machine.placement.wafers)]
    assert max(needed) == machine.placement.allocated_bytes


def test_law_5_the_engine_admits_what_the_capacity_says():
    machine = engine(mesh="2x1", micro_batch=8, kv_blocks=20, max_context=64)
    each = machine.queue.blocks.needed(30 + 11 - 1)
    assert each == 5
    for _ in range(16):
        machine.submit(list(range(30)), Sampling(max_new_tokens=11))
    assert len(machine.queue.admit()) == 20 // each


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("kv_cache", ["f32", "bf16", "fp8"])
def test_law_6_no_cache_is_copied(kv_cache, dtype):
    """A cache many times a micro-batch's, of which decoding copies less than a micro-batch's."""
    machine = engine(mesh="2x2", micro_batch=2, max_context=512, kv_blocks=2048, kv_cache=kv_cache, dtype=dtype)
    micro_batch = machine.cache_shape.block_bytes // 2 * machine.programs.sizes.blocks * 2
    assert machine.programs.temp_bytes < micro_batch


def test_law_6_one_compile_a_shape_and_no_copied_cache():
    machine = engine(mesh="2x2", micro_batch=2, max_context=512, kv_blocks=2048, prefill_chunk=64)
    run(machine, PROMPTS[:3])
    after = machine.programs.compiles
    run(machine, [[3] * n for n in (1, 5, 31, 32, 33, 64, 65, 130)])
    assert machine.programs.compiles == after + 1  # the other chunk length
    run(machine, [[2] * n for n in (9, 200, 44)])
    assert machine.programs.compiles == after + 1
    micro_batch = machine.cache_shape.block_bytes // 2 * machine.programs.sizes.blocks * 2
    assert machine.programs.temp_bytes < micro_batch
