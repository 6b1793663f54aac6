"""The laws of docs/architecture.md for layers with experts: Qwen3 MoE, GLM-4.x, and a latent mixture."""

import jax
import numpy as np
import pytest
from support import config, engine, random_checkpoint

from jaxwafer import model
from jaxwafer.model import llama
from jaxwafer.model.mlp import Activation, MoE, Router
from jaxwafer.model.spec import Layer
from jaxwafer.pipeline.queue import Sampling

PROMPTS = [[5, 17, 3], [99], list(range(1, 30)), [7] * 8, [4, 4, 2, 60, 61], list(range(60, 76)), [88, 1]]
# 7 experts over two cores; layers without experts are on one wafer of two, and in the middle of three.
QWEN = {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": True,
        "moe_intermediate_size": 20, "mlp_only_layers": [0, 2]}  # fmt: skip
GLM = {"architectures": ["Glm4MoeForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4,
       "topk_group": 2, "n_shared_experts": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
       "routed_scaling_factor": 2.5, "use_qk_norm": True, "attention_bias": True}  # fmt: skip
LATENT = {"architectures": ["LatentForCausalLM"]}


def latent_spec(fields: dict):
    """A Llama in which layers 1, 3 and 4 have a latent mixture."""
    spec = llama.spec(fields)
    mixture = MoE(
        hidden=spec.hidden, experts=5, intermediate=24, router=Router(score="sigmoid", chosen=2, bias=True, scale=2.0),
        eps=spec.eps, shared=40, latent=36, activation=Activation(name="situ", limits=(4.0, 25.0)),
    )  # fmt: skip
    layers = tuple(Layer(mixer=x.mixer, mlp=mixture if n in (1, 3, 4) else x.mlp) for n, x in enumerate(spec.layers))
    return llama.ModelSpec(**(vars(spec) | {"layers": layers}))


@pytest.fixture(autouse=True)
def family(monkeypatch):
    monkeypatch.setitem(model.FAMILIES, "LatentForCausalLM", latent_spec)


def source(changes: dict, form: str = "f32"):
    return random_checkpoint(config(**changes), form=form)


def run(machine, prompts, new: int = 9):
    requests = [machine.submit(p, Sampling(max_new_tokens=new)) for p in prompts]
    while machine.queue.busy:
        machine.step()
    return [r.tokens for r in requests]


@pytest.mark.parametrize("changes", [QWEN, GLM, LATENT], ids=["qwen3_moe", "glm4_moe", "latent"])
def test_laws_1_to_3_mesh_neighbours_slots_and_chunks_change_nothing(changes):
    """Four slots for seven requests on 2x2; fewer micro-batches than wafers, 5 layers on 3 wafers and a token at a time
    on 3x2."""
    one = engine(source(changes), prefill_chunk=32)
    alone = [run(one, [p])[0] for p in PROMPTS]
    scored = one.score(PROMPTS[2])
    assert len({tuple(t) for t in alone}) == len(PROMPTS)
    for options in ({"mesh": "2x2", "micro_batch": 2, "prefill_chunk": 7},
                    {"mesh": "3x2", "micro_batch": 1, "micro_batches": 2, "prefill_chunk": 1}):  # fmt: skip
        machine = engine(source(changes), **options)
        assert run(machine, PROMPTS) == alone
        np.testing.assert_allclose(machine.score(PROMPTS[2]), scored, atol=2e-5)


@pytest.mark.parametrize("changes", [QWEN, LATENT], ids=["qwen3_moe", "latent"])
def test_law_4_bytes_by_declaration_are_the_bytes_on_devices(changes):
    machine = engine(source(changes, form="int4"), mesh="2x3", weights="mixed")
    on_device = dict.fromkeys(machine.mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(machine.weights):
        for shard in leaf.addressable_shards:
            on_device[shard.device] += shard.data.nbytes
    for wafer in machine.mesh.devices:
        assert sum(on_device[d] for d in wafer) == machine.placement.allocated_bytes


def test_law_7_experts_that_no_token_chose_are_not_counted():
    """One request, 3 of 7 experts in each of three layers; every token of it reads exactly those."""
    machine = engine(source(QWEN), mesh="1x2", micro_batch=2)
    run(machine, [[5, 17, 3]])
    (number,) = (i for i, s in enumerate(machine.placement.mlps) if isinstance(s.kind, MoE))
    stats = machine.stats
    assert stats.tokens[0] == 8
    assert stats.experts[0, number] == 3 * 3 * 8
    assert stats.experts[0, 1 - number] == 0


def test_experts_in_four_bits_give_the_same_tokens_on_any_mesh():
    alone = run(engine(source(GLM, form="int4")), PROMPTS[:3])
    assert run(engine(source(GLM, form="int4"), mesh="2x2"), PROMPTS[:3]) == alone
