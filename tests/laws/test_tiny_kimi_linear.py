"""The bundled checkpoint: a trained hybrid whose wrong answers tell of a broken state, cache, hop or quantiser."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from bundled import NAME, parameters

from jaxwafer.checkpoint.open import open_checkpoint
from jaxwafer.cli.held_out import examples, grade
from jaxwafer.engine import Engine, Options
from jaxwafer.pipeline.queue import Sampling
from jaxwafer.train.model import KimiLinear

# Two requests of 300 tokens in a few hundred blocks; chunks that cut prompts where nothing else does.
EXACT = {"dtype": "f32", "kv_cache": "f32", "max_context": 352, "prefill_chunk": 64, "micro_batch": 20}


def answer(machine: Engine, asked) -> list:
    requests = [machine.submit(e.prompt, Sampling(max_new_tokens=len(e.answer.split()) + 1)) for e in asked]
    while machine.queue.busy:
        machine.step()
    return requests


def load(**options) -> Engine:
    return Engine(open_checkpoint(NAME), Options(**(EXACT | options)))


@pytest.fixture(scope="module")
def alone():
    """One device, and its answers to held-out prompts."""
    machine, asked = load(), examples(40)
    return machine, asked, answer(machine, asked)


def test_held_out_prompts_are_answered_exactly(alone):
    _, asked, requests = alone
    grades = grade(requests, asked)
    assert {task: grade["of"] for task, grade in grades.items()} == dict.fromkeys(grades, 40)
    assert all(grade["right"] / grade["of"] >= 0.99 for grade in grades.values()), grades


@pytest.mark.parametrize("mesh, activations", [("3x2", "float"), ("4x2", "int8")])
def test_any_mesh_and_activations_in_int8_give_the_same_tokens(alone, mesh, activations):
    """Three heads and 32 experts over two cores; over three wafers 8 layers are 3, 3 and 2, and no two are alike."""
    _, asked, requests = alone
    some = range(0, len(asked), 5)
    found = answer(load(mesh=mesh, micro_batch=4, activations=activations), [asked[n] for n in some])
    assert [r.tokens for r in found] == [requests[n].tokens for n in some]


def test_the_trained_model_is_the_engine(alone):
    """Log-probabilities of all prompts' tokens, by the flax modules on the values of the file, within 2e-4: trained
    logits reach 20."""
    machine, asked, _ = alone
    spec = machine.spec
    params = jax.tree.map(jnp.asarray, parameters(spec))
    forward = jax.jit(lambda tokens: KimiLinear(spec, capacity=None).apply({"params": params}, tokens)[0])
    for example in (asked[5], asked[-1]):
        tokens = machine.tokenizer.encode(f"{example.prompt} {example.answer}")
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            logits = forward(jnp.array([tokens]))[0]
        expected = jnp.take_along_axis(jax.nn.log_softmax(logits[:-1]), jnp.array(tokens)[1:, None], axis=1)
        np.testing.assert_allclose(machine.score(tokens), expected[:, 0], atol=2e-4)
