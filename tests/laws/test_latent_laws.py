"""The laws on a model whose cache is spread over cores: DeepSeek-V3, of awkward sizes."""

from functools import cache

import jax
import numpy as np
import pytest
from support import config, engine, random_checkpoint

from jaxwafer.pipeline.queue import Sampling

# 3 heads and 5 experts over two cores; no two dimensions are the same; one dense layer, as in Kimi K2.
FIELDS = {
    "architectures": ["DeepseekV3ForCausalLM"], "hidden_size": 48, "num_attention_heads": 3, "q_lora_rank": 20,
    "kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "intermediate_size": 80,
    "moe_intermediate_size": 24, "n_routed_experts": 5, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.0, "first_k_dense_replace": 1,
    "num_hidden_layers": 5, "vocab_size": 101, "rms_norm_eps": 1e-5, "max_position_embeddings": 4096,
    "torch_dtype": "float32", "rope_theta": 100.0,
    "rope_scaling": {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 32, "mscale_all_dim": 0.5},
}  # fmt: skip
PROMPTS = [[5, 17, 3], [99], list(range(1, 40)), [7] * 8, [4, 4, 2, 60, 61], list(range(60, 76)), [88, 1]]
WIDTH = 16 + 8


def run(machine, prompts, new=9):
    requests = [machine.submit(p, Sampling(max_new_tokens=new)) for p in prompts]
    while machine.queue.busy:
        machine.step()
    return [r.tokens for r in requests]


@pytest.fixture(scope="module")
def source():
    return random_checkpoint(FIELDS)


@pytest.fixture(scope="module")
def alone(source):
    """By the cache's format: tokens of each prompt on one device, one after another; and scores of one prompt."""

    @cache
    def of(form: str):
        machine = engine(source, kv_cache=form)
        tokens = [run(machine, [p])[0] for p in PROMPTS]
        assert len({tuple(t) for t in tokens}) == len(PROMPTS)
        return tokens, machine.score(PROMPTS[2])

    return of


@pytest.mark.parametrize(
    "form, options",
    [
        # Blocks are few, so that those of a request are balanced only as what is free allows.
        ("f32", {"mesh": "2x2", "micro_batch": 2, "kv_blocks": 19, "prefill_chunk": 7}),
        ("f32", {"mesh": "3x2", "micro_batch": 1, "micro_batches": 2, "prefill_chunk": 1}),
        ("fp8", {"mesh": "1x3", "micro_batch": 4, "block": 4}),
    ],
    ids=["2x2", "3x2", "1x3"],
)
def test_laws_1_to_3_mesh_neighbours_slots_and_chunks_change_nothing(source, alone, form, options):
    tokens, scores = alone(form)
    machine = engine(source, kv_cache=form, **options)
    assert run(machine, PROMPTS) == tokens
    assert machine.queue.blocks.free == machine.queue.blocks.count
    assert run(machine, PROMPTS[::-1]) == tokens[::-1]
    np.testing.assert_allclose(machine.score(PROMPTS[2]), scores, atol=2e-5 if form == "f32" else 1e-3)


def test_laws_4_and_5_bytes_are_spread_evenly_and_every_block_is_admitted(source):
    """21 blocks over 2 cores are made 22, of which a request of 40 tokens takes 5: 4 requests, whatever lies where."""
    machine = engine(source, mesh="2x2", micro_batch=8, kv_cache="fp8", kv_blocks=21, max_context=64)
    shape = machine.cache_shape
    assert machine.queue.blocks.count == shape.blocks == 22
    # e4m3 and one exponent a token, once on a wafer, however many heads and cores.
    assert [shape.token_bytes(s) for s in shape.placement.mixers] == [WIDTH + 1]
    on_device = dict.fromkeys(machine.mesh.devices.flat, 0)
    for leaf in jax.tree.leaves(machine._cache):
        for shard in leaf.addressable_shards:
            on_device[shard.device] += shard.data.nbytes
    assert set(on_device.values()) == {11 * 8 * 3 * (WIDTH + 1)}  # blocks · tokens · layers of the deepest wafer
    assert shape.allocated_bytes == 2 * 11 * 8 * 3 * (WIDTH + 1)
    for _ in range(6):
        machine.submit(list(range(30)), Sampling(max_new_tokens=11))
    for request in machine.queue.admit():
        on = np.bincount(request.blocks // 11, minlength=2)
        assert sorted(on.tolist()) == [2, 3]
    assert len(machine.queue.running) == 4


@pytest.mark.parametrize("fields", [FIELDS, config(num_key_value_heads=1)], ids=["latent", "one key/value head"])
def test_law_6_a_cache_with_an_axis_of_one_element_is_not_copied(fields):
    machine = engine(
        random_checkpoint(fields), mesh="2x2", micro_batch=2, max_context=512, kv_blocks=2048, prefill_chunk=64
    )
    run(machine, PROMPTS[:3])
    micro_batch = machine.cache_shape.block_bytes // 2 * machine.programs.sizes.blocks * 2
    assert machine.programs.temp_bytes < micro_batch
