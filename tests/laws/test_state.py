"""The laws on models with recurrent state: what a slot, a pad or a split of the prompt must not leave behind."""

import jax
import numpy as np
import pytest
from support import engine, random_checkpoint

from jaxwafer.pipeline.queue import Sampling

SHARED = {"hidden_size": 48, "vocab_size": 101, "num_hidden_layers": 5, "intermediate_size": 80, "rms_norm_eps": 1e-5,
          "torch_dtype": "float32"}  # fmt: skip
# Three heads over two cores; keys of 12, so that no size is a power of two. Layers 2 and 5 (from 1) are attention.
KIMI = SHARED | {
    "architectures": ["KimiLinearForCausalLM"], "num_attention_heads": 3, "kv_lora_rank": 16, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 2, "num_experts": 5, "num_experts_per_token": 2,
    "moe_intermediate_size": 20, "num_shared_experts": 1, "moe_renormalize": True, "routed_scaling_factor": 2.0,
    "model_max_length": 256, "linear_attn_config": {"full_attn_layers": [2, 5], "kda_layers": [1, 3, 4],
                                                    "head_dim": 12, "num_heads": 3, "short_conv_kernel_size": 4},
}  # fmt: skip
# Three keys, each of two values of another size. Layers 3 and, short of an interval, not 5 are attention.
QWEN = SHARED | {
    "architectures": ["Qwen3_5ForCausalLM"], "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
    "linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4, "full_attention_interval": 3, "max_position_embeddings": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
}  # fmt: skip
FAMILIES = {"Kimi Linear": KIMI, "Qwen3.5": QWEN}
PROMPTS = [[5, 17, 3], [99], list(range(1, 40)), [7] * 8, [4, 4, 2, 60, 61], list(range(60, 76)), [88, 1]]


def run(machine, prompts, new=9):
    requests = [machine.submit(p, Sampling(max_new_tokens=new)) for p in prompts]
    while machine.queue.busy:
        machine.step()
    return [r.tokens for r in requests]


@pytest.fixture(scope="module", params=FAMILIES)
def source(request):
    """Random weights, with decays under which state lasts for many tokens."""
    found, rng = random_checkpoint(FAMILIES[request.param]), np.random.default_rng(1)
    for name, tensor in found.tensors.items():
        if name.endswith("A_log"):
            found.tensors[name] = np.log(rng.uniform(0.02, 1.0, tensor.shape)).astype(np.float32)
    return found


@pytest.fixture(scope="module")
def alone(source):
    """An engine with one slot."""
    return engine(source)


@pytest.fixture(scope="module")
def expected(alone):
    return [run(alone, [p])[0] for p in PROMPTS]


@pytest.mark.parametrize("mesh, micro_batch", [("2x2", 2), ("3x2", 1)])
def test_any_mesh_and_neighbours_give_the_tokens_of_one_device_and_request(source, expected, mesh, micro_batch):
    """With fewer slots than prompts, so that slots are reused, and with pad rows once prompts run out (pitfall 1)."""
    assert run(engine(source, mesh=mesh, micro_batch=micro_batch), PROMPTS) == expected


def test_a_reused_slot_is_a_new_one(alone, source, expected):
    """The one slot has had other requests; a fresh engine gives the same state (pitfall 2) and tokens."""
    fresh = engine(source)
    for machine in (alone, fresh):
        assert run(machine, [PROMPTS[2]]) == [expected[2]]
    for used, new in zip(states(alone), states(fresh), strict=True):
        np.testing.assert_array_equal(used, new)


@pytest.mark.parametrize("chunk", [1, 7])
def test_any_chunks_of_the_prompt_give_the_same_state_and_scores(alone, source, chunk):
    """One layout of state, one result, whether tokens come by steps of one or padded chunks (pitfalls 3 and 4)."""
    tokens = PROMPTS[2] + PROMPTS[5]
    pieces = engine(source, prefill_chunk=chunk)
    np.testing.assert_allclose(pieces.score(tokens), alone.score(tokens), atol=2e-4)
    for one, other in zip(states(pieces), states(alone), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=5e-5)


def test_bytes_of_state_by_declaration_are_the_bytes_on_devices(source):
    machine = engine(source, mesh="3x2", micro_batch=2)
    cache, rows = machine.cache_shape, 3 * 2
    assert cache.rows == rows
    # One of three wafers has attention alone in Kimi Linear.
    state = sum(len(on) * cache.state_bytes(s) for s in machine.placement.mixers for on in s.layers)
    assert sum(cache.wafer_state_bytes(w) for w in range(3)) == state > 0
    for devices in machine.mesh.devices:
        found = sum(
            shard.data.nbytes
            for leaf in jax.tree.leaves(machine._cache)
            for shard in leaf.addressable_shards
            if shard.device in devices.tolist()
        )
        assert found == cache.allocated_bytes
        each = sum(s.depth * cache.state_bytes(s) for s in machine.placement.mixers)
        assert cache.allocated_bytes - cache.blocks * cache.block_bytes == rows * each


def states(machine):
    """Every array of recurrent state, as the last request left it."""
    fields = [(kind.kind.cache(), cache) for kind, cache in zip(machine.placement.mixers, machine._cache, strict=True)]
    return [np.asarray(cache[f.name].values) for fs, cache in fields for f in fs if hasattr(f, "axes")]
