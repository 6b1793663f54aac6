"""Checkpoints written in the hub's layout, and what loads of them."""

import json
from dataclasses import replace

import jax
import numpy as np
import pytest
from hub_folder import write_checkpoint as write_folder
from support import MemoryCheckpoint, checkpoint, config, random_checkpoint
from tiny_k3 import tiny_k3

from jaxwafer.checkpoint.gguf import GGUFCheckpoint
from jaxwafer.checkpoint.hub import HubCheckpoint, read_config
from jaxwafer.checkpoint.load import formats_for, planned_formats
from jaxwafer.checkpoint.write import hub_tensors, write_checkpoint
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.quant.formats import POLICIES

from . import packings
from .test_load import HEADS, loaded
from .test_packed_decode import stored

GPT_OSS = config(architectures=["GptOssForCausalLM"], num_local_experts=5, num_experts_per_tok=2, intermediate_size=32,
                 hidden_size=64, num_hidden_layers=2, sliding_window=6)  # fmt: skip


def reread(source, path, policy: str = "native", **options) -> HubCheckpoint:
    write_checkpoint(source, path, policy, **options)
    return HubCheckpoint(path)


def equal(one, other) -> None:
    """Two weight trees: the same formats, and every array bit for bit."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_array_on_smaller_and_larger_meshes_is_as_without_the_detour(policy, tmp_path):
    source = checkpoint(form="bf16", **HEADS)
    written = reread(source, tmp_path / "out", policy)
    for mesh in ("1x1", "2x1", "4x2"):
        _, direct = loaded(source, policy, mesh)
        equal(loaded(written, "native", mesh)[1], direct)


@pytest.mark.filterwarnings("ignore:.*quantised as they come")
@pytest.mark.parametrize("layout", packings.LAYOUTS)
def test_what_is_stored_in_a_published_layout_stays_bit_for_bit(layout, tmp_path):
    stored(tmp_path / "in", layout)
    source = HubCheckpoint(tmp_path / "in")
    written = reread(source, tmp_path / "out")
    for name in source.names():
        equal(written.read(name), source.read(name))


def test_the_config_alone_says_what_the_tensors_are(tmp_path):
    """Kimi K3's many kinds of layers, and experts in tensors of their own."""
    source = replace(tiny_k3(), form="bf16")
    written = reread(source, tmp_path / "k3", "int4")
    spec = spec_from_config(source.config)
    fields, quantization = read_config(tmp_path / "k3")
    planned = planned_formats(quantization, spec.native, "native")
    for name, weight in hub_tensors(spec):
        if weight.matrix:
            said, held = planned(name, weight), written.stored(name)
            assert (said.scale is None) == (held.scale is None) == (weight.role not in POLICIES["int4"])
            assert said.family == held.family or said.scale is None
            assert formats_for(source, "int4")(name, weight) == written.stored(name)
    assert fields == source.config


@pytest.mark.parametrize("shard_bytes, files", [(10**9, 1), (1, 48), (40_000, 8)])
def test_shards_and_their_index(shard_bytes, files, tmp_path):
    source = checkpoint(form="bf16")
    written = reread(source, tmp_path / "out", shard_bytes=shard_bytes)
    names = sorted(p.name for p in (tmp_path / "out").glob("*.safetensors"))
    assert len(names) == files
    index = tmp_path / "out" / "model.safetensors.index.json"
    assert index.exists() == (files > 1)
    if files > 1:
        assert names[0] == f"model-00001-of-{files:05}.safetensors"
        fields = json.loads(index.read_text())
        assert fields["metadata"]["total_size"] == sum(written.read(n).nbytes for n in written.names())
        assert set(fields["weight_map"]) == set(source.tensors)
    for name in source.names():
        equal(written.read(name), source.read(name))


def test_a_gguf_file_becomes_a_folder_with_the_same_tokenizer(write_gguf, tmp_path):
    path, _ = write_gguf("Q8_0")
    source = GGUFCheckpoint(path)
    written = reread(source, tmp_path / "out")
    for name in source.names():
        equal(written.read(name), source.read(name))
    ours, theirs = source.tokenizer(), written.tokenizer()
    text = "<|im_start|>hello world 123é"
    assert ours.encode(text) == theirs.encode(text)
    for field in ("eos_ids", "bos_id", "add_bos", "chat_template"):
        assert getattr(ours, field) == getattr(theirs, field)


def test_the_tokenizers_files_come_along(tmp_path):
    write_folder(tmp_path / "in", checkpoint())
    written = reread(HubCheckpoint(tmp_path / "in"), tmp_path / "out", "bf16")
    assert written.tokenizer().encode("t7 t5") == [7, 5]
    assert written.stored("lm_head.weight").name == "bf16"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "out"]


def test_a_format_without_a_published_layout_is_refused_by_name_and_leaves_nothing(write_gguf, tmp_path):
    path, _ = write_gguf("Q4_1")
    with pytest.raises(UserError, match="is int4-min, .* no published layout outside GGUF: choose --weights int8"):
        write_checkpoint(GGUFCheckpoint(path), tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["tiny.gguf"]
    stack = random_checkpoint(GPT_OSS, form="bf16")
    with pytest.raises(UserError, match="experts.* holds a stack of experts: .* not with int8"):
        write_checkpoint(stack, tmp_path / "out", "int8")


def test_gpt_oss_keeps_its_experts_as_blocks(tmp_path):
    blocks = random_checkpoint(GPT_OSS, form="mxfp4")
    plain = replace(blocks, form="bf16")
    mixed = Mixed(**vars(plain))
    mixed.others = blocks
    written = reread(mixed, tmp_path / "out")
    found = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert found["quant_method"] == "mxfp4" and "lm_head$" in found["modules_to_not_convert"]
    for name in mixed.names():
        equal(written.read(name), mixed.read(name))
    assert written.stored("model.layers.0.mlp.experts.down_proj").name == "mxfp4"
    # As floats they lie the other way round.
    floats = reread(mixed, tmp_path / "floats", "f32")
    assert floats.shape("model.layers.0.mlp.experts.down_proj") == (5, 32, 64)
    _, direct = loaded(mixed, "f32", "2x1")
    equal(loaded(floats, "native", "2x1")[1], direct)


class Mixed(MemoryCheckpoint):
    """Experts as in the checkpoint `others`."""

    def stored(self, name):
        return self.others.stored(name) if name.endswith("experts.down_proj") else super().stored(name)

    def read(self, name):
        return self.others.read(name) if name.endswith("experts.down_proj") else super().read(name)


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="is already there"):
        write_checkpoint(checkpoint(), tmp_path / "out")
    with pytest.raises(UserError, match="cannot write .*: No such file or directory"):
        write_checkpoint(checkpoint(), tmp_path / "no" / "out")


def test_floats_need_no_quantization_config(tmp_path):
    reread(checkpoint(), tmp_path / "out", "bf16")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
