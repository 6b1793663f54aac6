"""A tiny Llama in each published layout: bytes on devices, and the tokens of the same weights in float32."""

import json
from dataclasses import replace

import jax
import ml_dtypes
import numpy as np
import pytest
from hub_folder import write_tokenizer
from support import MemoryCheckpoint, checkpoint, config, engine, random_checkpoint

from jaxwafer.checkpoint.hub import HubCheckpoint
from jaxwafer.checkpoint.load import formats_for, stored_tensor
from jaxwafer.engine import Engine
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.partition.placement import place
from jaxwafer.partition.plan import uniform
from jaxwafer.pipeline.queue import Sampling

from . import packings
from .test_hub import content

# Two cores have whole groups of 128 in every matrix that is cut along its inputs.
SIZES = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=256,
             num_hidden_layers=2)  # fmt: skip
PROMPTS = [[5, 17, 3], [99, 4], list(range(30, 60))]


def stored(folder, layout: str) -> MemoryCheckpoint:
    """Write a folder whose projections are in `layout`; returns the same weights in float32."""
    quantization, pack, _ = packings.LAYOUTS[layout]
    plain, rng = checkpoint(**SIZES), np.random.default_rng(0)
    arrays, tensors = {}, {}
    for name, tensor in plain.tensors.items():
        if name.endswith("_proj.weight"):
            parts, matrix = pack(rng, *tensor.shape)
            arrays |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
            tensors[name] = matrix.astype(np.float32)
        else:
            tensors[name] = tensor.astype(ml_dtypes.bfloat16).astype(np.float32)
            arrays[name] = tensor.astype(ml_dtypes.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(plain.config | {"quantization_config": quantization}))
    (folder / "model.safetensors").write_bytes(content(arrays))
    write_tokenizer(folder, plain.config["vocab_size"])
    return replace(plain, tensors=tensors)


def tokens(machine: Engine) -> list[list[int]]:
    requests = [machine.submit(p, Sampling(max_new_tokens=8)) for p in PROMPTS]
    while machine.queue.busy:
        machine.step()
    return [r.tokens for r in requests]


@pytest.mark.filterwarnings("ignore:.*quantised as they come")
@pytest.mark.parametrize("layout", packings.LAYOUTS)
def test_tokens_are_those_of_the_same_weights_in_float32(layout, tmp_path):
    plain = stored(tmp_path / "model", layout)
    packed = HubCheckpoint(tmp_path / "model")
    machine = engine(packed, mesh="2x2", micro_batch=2)
    form = packings.LAYOUTS[layout][2]
    assert {f.name for f in machine.placement.formats} == {form, "bf16"}
    for wafer in machine.mesh.devices:
        on_device = [s for leaf in jax.tree.leaves(machine.weights) for s in leaf.addressable_shards]
        nbytes = sum(s.data.nbytes for s in on_device if s.device in wafer)
        assert nbytes == machine.placement.allocated_bytes
    wide = engine(plain, mesh="2x2", micro_batch=2)
    np.testing.assert_allclose(machine.score(PROMPTS[2]), wide.score(PROMPTS[2]), atol=1e-5)
    got = tokens(machine)
    assert got == tokens(wide) and len({t for each in got for t in each}) > 8


def test_cores_that_cut_a_block_are_refused_before_anything_is_compiled(tmp_path):
    stored(tmp_path / "model", "int4 group 128 f32")
    with pytest.raises(UserError) as error:
        engine(HubCheckpoint(tmp_path / "model"), mesh="1x4")
    # Two key/value heads are copied to four cores, with one query head of 64 a core.
    assert str(error.value).startswith(
        "self_attn.o_proj.weight: axis 'heads' of 256 over 4 cores gives 64 inputs a core in units of 64, which cuts "
        "the int4-g128-f32 groups of 128"
    )


def test_experts_of_a_layer_in_different_formats_are_refused(tmp_path):
    """Whatever the first is, another would be rounded to it."""
    fields = config(architectures=["Qwen3MoeForCausalLM"], num_experts=2, num_experts_per_tok=1, hidden_size=64,
                    moe_intermediate_size=32, num_hidden_layers=1)  # fmt: skip
    plain = random_checkpoint(fields)
    arrays, name = dict(plain.tensors), "model.layers.0.mlp.experts.0.up_proj."
    shape = arrays.pop(name + "weight").shape
    parts, _ = packings.int4(np.random.default_rng(0), *shape, 32, np.float16)
    arrays |= {name + end: part for end, part in parts.items()}
    (tmp_path / "config.json").write_text(
        json.dumps(fields | {"quantization_config": packings.compressed("pack-quantized")})
    )
    (tmp_path / "model.safetensors").write_bytes(content(arrays))
    source = HubCheckpoint(tmp_path)
    place_on = place(spec_from_config(fields), uniform(1, 1), formats_for(source, "native"), cores=1)
    with pytest.raises(
        UserError, match="experts.1.up_proj.weight is stored as f32, but that of expert 0 int4; experts"
    ):
        stored_tensor(source, place_on.mlps[0].weights["up"], 0)
