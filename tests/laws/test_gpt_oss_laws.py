"""The laws of docs/architecture.md for gpt-oss: windows on alternate layers, sinks, biases, fused experts in MXFP4."""

import jax
import numpy as np
from support import config, engine, random_checkpoint

from jaxwafer.pipeline.queue import Sampling

PROMPTS = [[5, 17, 3], [99], list(range(1, 30)), [7] * 8, [4, 4, 2, 60, 61], list(range(60, 76)), [88, 1]]
# The window is shorter than a block of 8; 5 layers on 3 wafers; 5 experts over two cores.
FIELDS = config(architectures=["GptOssForCausalLM"], num_local_experts=5, num_experts_per_tok=2, intermediate_size=32,
                sliding_window=6)  # fmt: skip


def run(machine, prompts, new: int = 9):
    requests = [machine.submit(p, Sampling(max_new_tokens=new)) for p in prompts]
    while machine.queue.busy:
        machine.step()
    return [r.tokens for r in requests]


def test_laws_1_to_3_mesh_neighbours_slots_and_chunks_change_nothing():
    source = random_checkpoint(FIELDS, form="mxfp4")
    # Biases around zero: around one they would drown what the tokens say.
    for name in source.tensors:
        if name.endswith("bias") and source.tensors[name].ndim == 1:
            source.tensors[name] -= 1
    one = engine(source, prefill_chunk=32)
    alone = [run(one, [p])[0] for p in PROMPTS]
    scored = one.score(PROMPTS[2])
    assert len({tuple(t) for t in alone}) == len(PROMPTS)
    for options in ({"mesh": "2x2", "micro_batch": 2, "prefill_chunk": 7},
                    {"mesh": "3x2", "micro_batch": 1, "micro_batches": 2, "prefill_chunk": 1}):  # fmt: skip
        machine = engine(source, **options)
        assert run(machine, PROMPTS) == alone
        np.testing.assert_allclose(machine.score(PROMPTS[2]), scored, atol=2e-5)
        on_device = [s for leaf in jax.tree.leaves(machine.weights) for s in leaf.addressable_shards]
        for wafer in machine.mesh.devices:
            assert sum(s.data.nbytes for s in on_device if s.device in wafer) == machine.placement.allocated_bytes
