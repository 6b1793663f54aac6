"""Weights that are brought layer by layer, against the same weights on the device."""

import importlib.util
import inspect

import jax
import numpy as np
import pytest
from support import checkpoint, config, engine, greedy, random_checkpoint
from tiny_k3 import tiny_k3

from jaxwafer.mesh import MeshShape
from jaxwafer.model import spec_from_config
from jaxwafer.ops.operations import Operations
from jaxwafer.options import Options, prepare
from jaxwafer.pipeline.queue import Sampling
from jaxwafer.pipeline.stream import BroughtOperations
from jaxwafer.quant.formats import FORMATS
from jaxwafer.topology import tpu_target

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


def test_every_operation_on_weights_takes_those_that_were_brought():
    """One that passed through would look for a layer's number in a stack of one."""
    signatures = {name: inspect.signature(f) for name, f in vars(Operations).items() if callable(f)}
    weights = {
        name for name, signature in signatures.items()
        if not name.startswith("_") and ("QuantizedArray" in str(signature) or "weights" in signature.parameters)
    }  # fmt: skip
    assert weights - {"lookup"} == {n for n in vars(BroughtOperations) if not n.startswith("_")}


def test_what_is_on_the_device_does_not_grow_with_the_layers():
    few, many = (engine(checkpoint(num_hidden_layers=n), stream_weights=True) for n in (6, 12))
    place = many.placement
    layer = sum(place.layer_bytes(stack) for stack in place.stacks)
    assert few.programs.temp_bytes == many.programs.temp_bytes < 4 * layer
    assert np.isfinite(many.score(PROMPTS[2])).all()


@pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="no libtpu here; pip install 'jaxwafer[tpu]'")
def test_on_a_tpu_layers_wait_in_host_memory_and_their_copies_start_ahead():
    target = tpu_target("v5e:2x2", MeshShape(2, 2))
    fields = config(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=512,
                    num_hidden_layers=8)  # fmt: skip
    options = Options(mesh="2x2", max_context=256, stream_weights=True)
    formats = lambda _, weight: FORMATS["bf16" if weight.matrix else "f32"]  # noqa: E731
    programs = prepare(spec_from_config(fields), formats, target.mesh, options)
    program, place = programs.decode(filters=False), programs.pipeline.placement
    layers = (place.allocated_bytes - place.global_bytes) // place.cores
    memory = program.memory_analysis()
    assert memory.host_argument_size_in_bytes >= layers > memory.argument_size_in_bytes - programs.cache.allocated_bytes
    assert "slice-start" in program.as_text() or "copy-start" in program.as_text()
