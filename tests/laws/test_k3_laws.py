"""The laws of docs/architecture.md for Kimi K3, whose blocks of residuals hop from wafer to wafer."""

import numpy as np
import pytest
from support import engine
from tiny_k3 import tiny_k3

from jaxwafer.partition.plan import Visit, routed
from jaxwafer.pipeline.queue import Sampling

PROMPTS = [[5, 17, 3], [9], list(range(1, 40)), [7] * 8, [4, 4, 2, 20, 21], list(range(20, 36)), [8, 1]]
LONG = PROMPTS[2] + PROMPTS[5]
# Wafers 0 and 1 are visited twice, and in the same phase run unlike numbers of layers of unlike kinds.
ROUTE = routed((Visit(0, (0,)), Visit(1, (1, 2)), Visit(0, (3,)), Visit(1, (4,)), Visit(2, (5, 6))), 3)
TOLERANCE = 5e-5


def run(machine, prompts, new: int = 9):
    requests = [machine.submit(p, Sampling(max_new_tokens=new)) for p in prompts]
    while machine.queue.busy:
        machine.step()
    return [r.tokens for r in requests]


@pytest.fixture(scope="module")
def source():
    return tiny_k3()


@pytest.fixture(scope="module")
def alone(source):
    """Each prompt by itself on one device, one after the other in the same slot, and the scores of a long one."""
    machine = engine(source, micro_batch=1, micro_batches=1)
    tokens = [run(machine, [p])[0] for p in PROMPTS]
    assert len({tuple(t) for t in tokens}) == len(PROMPTS)
    return tokens, machine.score(LONG)


def test_a_used_slot_gives_the_tokens_of_a_fresh_one(source, alone):
    machine = engine(source, micro_batch=1, micro_batches=1)
    assert run(machine, [PROMPTS[5]])[0] == alone[0][5]
    assert run(machine, [PROMPTS[0]])[0] == alone[0][0]


@pytest.mark.parametrize(
    "mesh, options",
    [("2x2", {"micro_batch": 2, "prefill_chunk": 7}),
     ("3x2", {"micro_batch": 1, "micro_batches": 2, "prefill_chunk": 1})],
)  # fmt: skip
def test_mesh_neighbours_slots_and_chunks_change_nothing(mesh, options, source, alone):
    """Four slots or two for seven requests; seven layers on three wafers; the prompt in chunks of 7 and of 1 token."""
    tokens, scores = alone
    machine = engine(source, mesh=mesh, **options)
    assert run(machine, PROMPTS) == tokens
    np.testing.assert_allclose(machine.score(LONG), scores, atol=TOLERANCE)


def test_a_route_that_visits_wafers_again_changes_nothing(source, alone):
    tokens, scores = alone
    machine = engine(source, mesh="3x1", partition=ROUTE, micro_batch=2, prefill_chunk=7)
    assert run(machine, PROMPTS) == tokens
    np.testing.assert_allclose(machine.score(LONG), scores, atol=TOLERANCE)


def test_as_it_is_run_by_default_the_scores_are_near(source, alone):
    """bfloat16 activations and an fp8 cache, on a mesh."""
    machine = engine(source, mesh="2x2", dtype="bf16", kv_cache="fp8")
    assert np.abs(machine.score(LONG) - alone[1]).mean() < 0.1
