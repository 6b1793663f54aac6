"""Published layouts of quantised matrices against their equations, packed by hand (`packings`)."""

import json
import mmap
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxwafer.checkpoint.files import map_file
from jaxwafer.checkpoint.hub import HubCheckpoint
from jaxwafer.errors import UserError
from jaxwafer.quant.convert import dequantize

from . import packings
from .conftest import one_line
from .test_hub import content


def write(folder, tensors: dict, quantization) -> HubCheckpoint:
    fields = {"architectures": ["LlamaForCausalLM"], "quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "model.safetensors").write_bytes(content(tensors))
    return HubCheckpoint(folder)


@pytest.mark.filterwarnings("ignore:.*quantised as they come")
@pytest.mark.parametrize("outputs, inputs", [(5, 128), (136, 256), (130, 64)])
@pytest.mark.parametrize("layout", packings.LAYOUTS)
def test_every_layout_has_the_values_of_its_equation(layout, outputs, inputs, tmp_path):
    quantization, pack, form = packings.LAYOUTS[layout]
    tensors, matrix = pack(np.random.default_rng(0), outputs, inputs)
    checkpoint = write(tmp_path, {f"m.p.{k}": v for k, v in tensors.items()}, quantization)
    assert list(checkpoint.names()) == ["m.p.weight"] and "quantization_config" not in checkpoint.config
    assert checkpoint.shape("m.p.weight") == (outputs, inputs) and checkpoint.stored("m.p.weight").name == form
    got = checkpoint.read("m.p.weight")
    assert got.format == checkpoint.stored("m.p.weight")
    # Products of two of these numbers are exact in float32, but for e4m3 times float32, which is rounded once.
    np.testing.assert_array_equal(dequantize(got)[:, :inputs], matrix.astype(np.float32))


@pytest.mark.parametrize("inputs", [40, 100])
def test_inputs_that_end_within_a_group_or_a_word(inputs, tmp_path):
    tensors, matrix = packings.int4(np.random.default_rng(1), 9, inputs, 64, np.float32, zero=True)
    config = packings.compressed("pack-quantized", group_size=64, symmetric=False)
    got = write(tmp_path, {f"p.{k}": v for k, v in tensors.items()}, config).read("p.weight")
    assert got.values.shape == (9, -(-inputs // 64) * 32)
    np.testing.assert_array_equal(dequantize(got)[:, :inputs], matrix.astype(np.float32))


def test_experts_of_gpt_oss(tmp_path):
    tensors, matrix = packings.gpt_oss(np.random.default_rng(2), 3, 6, 64)
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    arrays = {f"mlp.experts.down_proj_{k}": v for k, v in tensors.items()}
    checkpoint = write(tmp_path, arrays | {"mlp.experts.down_proj_bias": np.ones((3, 6), np.float32)}, config)
    assert set(checkpoint.names()) == {"mlp.experts.down_proj", "mlp.experts.down_proj_bias"}
    assert checkpoint.shape("mlp.experts.down_proj") == (3, 6, 64)
    got = checkpoint.read("mlp.experts.down_proj")
    assert got.format.name == "mxfp4"
    np.testing.assert_array_equal(dequantize(got), matrix.astype(np.float32))


def test_every_nibble_and_every_scale_of_mxfp4(tmp_path):
    """But for the two scales with which 6 is beyond float32, and the one that is not a number."""
    packed = np.tile(np.arange(16, dtype=np.uint8) * 0x11, (253, 1))
    scale = np.arange(253, dtype=np.uint8)[:, None]
    config = packings.compressed("mxfp4-pack-quantized", type="float")
    got = write(tmp_path, {"p.weight_packed": packed, "p.weight_scale": scale}, config).read("p.weight")
    values = np.array([s * v for s in (1, -1) for v in packings.E2M1]).repeat(2)
    np.testing.assert_array_equal(dequantize(got), np.float32(values * 2.0 ** (np.arange(253.0)[:, None] - 127)))


def test_parts_are_the_files_own_bytes(tmp_path):
    """No copy is made, so what is not read is not mapped into memory."""
    tensors, _ = packings.int4(np.random.default_rng(3), 8, 64, 32, ml_dtypes.bfloat16)
    checkpoint = write(tmp_path, {f"p.{k}": v for k, v in tensors.items()}, packings.compressed("pack-quantized"))
    got = checkpoint.read("p.weight")
    for part in (got.values, got.scale):
        while isinstance(part, np.ndarray):
            part = part.base
        assert isinstance(getattr(part, "obj", part), mmap.mmap)
    assert isinstance(map_file(tmp_path / "config.json"), mmap.mmap)


def test_a_tensor_is_quantised_where_its_packed_values_are_whatever_the_config_names(tmp_path):
    """K3's latent projections are bfloat16 and not ignored; here a projection that is ignored is packed as well."""
    tensors, matrix = packings.int4(np.random.default_rng(4), 4, 64, 32, ml_dtypes.bfloat16)
    arrays = {f"m.self_attn.q_proj.{k}": v for k, v in tensors.items()}
    arrays["m.mlp.latent.weight"] = np.ones((4, 4), ml_dtypes.bfloat16)
    checkpoint = write(tmp_path, arrays, packings.compressed("pack-quantized"))
    assert checkpoint.stored("m.mlp.latent.weight").name == "bf16"
    got = dequantize(checkpoint.read("m.self_attn.q_proj.weight"))
    np.testing.assert_array_equal(got, matrix.astype(np.float32))


def test_groups_are_told_apart_by_their_targets(tmp_path):
    config = packings.compressed("pack-quantized")
    wide = {
        "targets": ["re:.*down_proj"],
        "weights": config["config_groups"]["group_0"]["weights"] | {"group_size": 64},
    }
    config["config_groups"]["group_1"] = wide
    rng = np.random.default_rng(5)
    arrays = {f"m.up_proj.{k}": v for k, v in packings.int4(rng, 4, 128, 32, np.float16)[0].items()}
    tensors, matrix = packings.int4(rng, 4, 128, 64, np.float16)
    checkpoint = write(tmp_path, arrays | {f"m.down_proj.{k}": v for k, v in tensors.items()}, config)
    assert {n: checkpoint.stored(n).group for n in checkpoint.names()} == {
        "m.up_proj.weight": 32,
        "m.down_proj.weight": 64,
    }
    np.testing.assert_array_equal(dequantize(checkpoint.read("m.down_proj.weight")), matrix.astype(np.float32))


def test_dynamic_activations_are_left_as_they_are_and_said_so(tmp_path):
    quantization, pack, _ = packings.LAYOUTS["DeepSeek fp8"]
    tensors, _ = pack(np.random.default_rng(0), 4, 64)
    with pytest.warns(UserWarning, match="only its weights are quantised"):
        write(tmp_path, {f"p.{k}": v for k, v in tensors.items()}, quantization)


def test_files_of_the_safetensors_library(tmp_path):
    tensors, matrix = packings.int4(np.random.default_rng(6), 8, 64, 32, np.float16)
    write(tmp_path, {"x": np.zeros(1, np.float32)}, packings.compressed("pack-quantized"))
    safetensors.numpy.save_file({f"p.{k}": v for k, v in tensors.items()}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(dequantize(HubCheckpoint(tmp_path).read("p.weight")), matrix.astype(np.float32))


INT4 = packings.compressed("pack-quantized")


@pytest.mark.parametrize(
    "change, says",
    [
        ({"p.weight_scale": None}, "'p.weight' is int4 without 'p.weight_scale'"),
        ({"p.weight_shape": None}, "'p.weight' is int4 without 'p.weight_shape'"),
        ({"p.weight_scale": np.ones((4, 3), np.float16)}, "'p.weight_scale' is F16 [4, 3], but should be [4, 2]"),
        ({"p.weight_scale": np.ones((4, 2), np.int64)}, "'p.weight_scale' is I64 [4, 2], but should be of floating"),
        ({"p.weight_shape": np.array([4, 80])}, "'p.weight_packed' is I32 [4, 8], but should be the 4 x 80 matrix"),
        ({"p.weight_shape": np.array([4.0, 64.0], np.float32)}, "'p.weight_shape' is F32 [2], but should be two I64"),
        ({"p.input_scale": np.ones(1, np.float32)}, "'p.input_scale' is of a quantisation that is not supported"),
        ({"p.weight_g_idx": np.arange(64)}, "'p.weight_g_idx' is of a quantisation"),
        (
            {"q.weight": np.ones((4, 4), ml_dtypes.float8_e4m3fn)},
            "'q.weight' is stored as fp8, but the config has int4",
        ),
    ],
)
def test_a_matrix_that_lacks_a_part_or_has_a_wrong_one_is_named(change, says, tmp_path):
    tensors, _ = packings.int4(np.random.default_rng(7), 4, 64, 32, np.float16)
    arrays = {f"p.{k}": v for k, v in tensors.items()} | change
    with pytest.raises(UserError) as error:
        checkpoint = write(tmp_path, {k: v for k, v in arrays.items() if v is not None}, INT4)
        for name in checkpoint.names():
            checkpoint.shape(name)
            checkpoint.read(name)
    assert says in one_line(error)


def test_packed_tensors_without_a_config_are_refused(tmp_path):
    tensors, _ = packings.int4(np.random.default_rng(7), 4, 64, 32, np.float16)
    checkpoint = write(tmp_path, {f"p.{k}": v for k, v in tensors.items()}, None)
    with pytest.raises(UserError, match="'p.weight' is stored as int4, but the config says nothing of it"):
        checkpoint.read("p.weight")


def test_damage_gives_a_message_or_a_readable_file(tmp_path):
    rng = np.random.default_rng(8)
    arrays = {f"a.{k}": v for k, v in packings.int4(rng, 4, 64, 32, np.float16, zero=True)[0].items()}
    arrays |= {f"b_{k}": v for k, v in packings.gpt_oss(rng, 2, 4, 32)[0].items()}
    arrays |= {f"c.{k}": v for k, v in packings.fp8(rng, 4, 64, None, None, end="weight_scale")[0].items()}
    config = packings.compressed("pack-quantized", symmetric=False)
    weights = config["config_groups"]["group_0"]["weights"]
    mxfp4, fp8 = {"type": "float", "symmetric": True}, packings.FP8 | {"strategy": "tensor", "symmetric": True}
    for target, form, other in (("b", "mxfp4-pack-quantized", mxfp4), ("c", "float-quantized", fp8)):
        config["config_groups"][target] = {"targets": [target], "format": form, "weights": weights | other}
    write(tmp_path, arrays, config)
    whole = content(arrays)
    (header,) = struct.unpack_from("<Q", whole)
    changes = st.lists(st.tuples(st.integers(8, 8 + header - 1), st.sampled_from(b"0123456789,[]_abcU8I3")), max_size=3)

    @settings(max_examples=300, deadline=None)
    @given(changes)
    def check(changes):
        data = bytearray(whole)
        for at, byte in changes:
            data[at] = byte
        (tmp_path / "model.safetensors").write_bytes(data)
        try:
            checkpoint = HubCheckpoint(tmp_path)
            for name in checkpoint.names():
                shape = checkpoint.shape(name)
                if checkpoint.stored(name).scale:
                    assert dequantize(checkpoint.read(name)).shape[:-1] == shape[:-1]
        except UserError as error:
            assert str(error) and "\n" not in str(error)

    check()
