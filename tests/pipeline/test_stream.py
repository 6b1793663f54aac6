"""Weights that are brought layer by layer, against the same weights on the device."""

import jax
import numpy as np
import pytest
from support import checkpoint, config, engine, greedy, random_checkpoint
from tiny_k3 import tiny_k3

from jaxwafer.pipeline.queue import Sampling

PROMPTS = [[5, 17, 3], [90, 4], list(range(30, 45))]
MIXTURE = config(architectures=["Qwen3MoeForCausalLM"], num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
                 norm_topk_prob=True, num_hidden_layers=3)  # fmt: skip


def run(machine, count: int = 6) -> list[list[int]]:
    requests = [machine.submit(p, Sampling(max_new_tokens=count)) for p in PROMPTS]
    while machine.queue.busy:
        machine.step()
    return [r.tokens for r in requests]


@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
def test_the_tokens_are_the_textbooks(mesh):
    source = checkpoint()
    machine = engine(source, mesh=mesh, stream_weights=True)
    kinds = {
        leaf.sharding.memory_kind for group in ("mixers", "mlps") for leaf in jax.tree.leaves(machine.weights[group])
    }
    assert kinds == {"pinned_host"}
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(machine.weights["globals"])} == {"device"}
    assert run(machine) == [greedy(source, p, 6) for p in PROMPTS]


@pytest.mark.parametrize("source, options", [
    (random_checkpoint(MIXTURE), {"weights": "int4"}),
    (tiny_k3(), {}),
], ids=["int4 experts", "hybrid"])  # fmt: skip
def test_every_kind_of_layer_and_quantised_weights_give_the_same_tokens(source, options):
    assert run(engine(source, stream_weights=True, **options)) == run(engine(source, **options))


def test_what_is_on_the_device_does_not_grow_with_the_layers():
    few, many = (engine(checkpoint(num_hidden_layers=n), stream_weights=True) for n in (6, 12))
    place = many.placement
    layer = sum(place.layer_bytes(stack) for stack in place.stacks)
    assert few.programs.temp_bytes == many.programs.temp_bytes < 4 * layer
    assert np.isfinite(many.score(PROMPTS[2])).all()
