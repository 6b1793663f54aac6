"""Hugging Face folders against the safetensors library, and every way one can be broken."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxwafer.checkpoint.hub import HubCheckpoint, read_config
from jaxwafer.errors import UserError
from jaxwafer.quant.convert import dequantize

from .conftest import one_line

RNG = np.random.default_rng(0)
FLOATS = {
    "a.weight": RNG.standard_normal((3, 5)).astype(np.float32),
    "b.weight": RNG.standard_normal((4, 2)).astype(ml_dtypes.bfloat16),
    "norm.weight": RNG.standard_normal(7).astype(np.float16),
}
NAMES_OF = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float8_e4m3fn": "F8_E4M3", "int64": "I64",
            "int32": "I32", "uint8": "U8"}  # fmt: skip
PER_CHANNEL = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": None,
        }
    },
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
}


def pack(header: dict | bytes, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def content(arrays: dict[str, np.ndarray]) -> bytes:
    header, data = {"__metadata__": {"format": "pt"}}, b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": NAMES_OF[str(array.dtype)], "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    return pack(header, data)


@pytest.fixture
def folder(tmp_path):
    """A function that writes a folder of one safetensors file, from arrays or bytes, and returns it."""

    def write(weights=FLOATS, **config):
        (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"]} | config))
        data = weights if isinstance(weights, bytes) else content(weights)
        (tmp_path / "model.safetensors").write_bytes(data)
        return tmp_path

    return write


def test_tensors_are_those_that_were_written(folder):
    checkpoint = HubCheckpoint(folder())
    assert set(checkpoint.names()) == set(FLOATS)
    for name, array in FLOATS.items():
        read = checkpoint.read(name)
        assert checkpoint.shape(name) == array.shape and read.values.dtype == array.dtype
        assert checkpoint.stored(name) == read.format and read.scale is read.minimum is None
        np.testing.assert_array_equal(read.values, array)
    assert {n: checkpoint.stored(n).name for n in FLOATS} == {
        "a.weight": "f32",
        "b.weight": "bf16",
        "norm.weight": "f16",
    }


def test_files_of_the_safetensors_library(folder, tmp_path):
    folder()
    arrays = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "y": np.ones((0, 4), np.float16), "z": np.float32(3)}
    safetensors.numpy.save_file({k: np.asarray(v) for k, v in arrays.items()}, tmp_path / "model.safetensors")
    checkpoint = HubCheckpoint(tmp_path)
    for name, array in arrays.items():
        np.testing.assert_array_equal(checkpoint.read(name).values, array)


def test_unaligned_data_is_read_aligned(folder):
    header = {"odd": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}
    text = json.dumps(header)
    text += " " * ((1 - len(text)) % 4)
    values = HubCheckpoint(folder(pack(text.encode(), np.float32([1, 2]).tobytes()))).read("odd").values
    assert values.flags.aligned
    np.testing.assert_array_equal(values, [1, 2])


def shards(folder, index):
    path = folder()
    (path / "model.safetensors").unlink()
    (path / "one.safetensors").write_bytes(content({"a.weight": FLOATS["a.weight"]}))
    (path / "two.safetensors").write_bytes(content({k: v for k, v in FLOATS.items() if k != "a.weight"}))
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


MAP = {"a.weight": "one.safetensors", "b.weight": "two.safetensors", "norm.weight": "two.safetensors"}


def test_shards(folder):
    checkpoint = HubCheckpoint(shards(folder, {"metadata": {}, "weight_map": MAP}))
    assert set(checkpoint.names()) == set(FLOATS)
    for name, array in FLOATS.items():
        np.testing.assert_array_equal(checkpoint.read(name).values, array)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({"weight_map": MAP | {"c": "three.safetensors"}}, "'three.safetensors'"),
        ({"weight_map": MAP | {"c.weight": "one.safetensors"}}, "'c.weight'"),
        ({"weight_map": MAP | {"c": "../one.safetensors"}}, "'../one.safetensors'"),
        ({"weight_map": MAP | {"c": 1}}, "weight_map"),
        ({"weight_map": []}, "weight_map"),
        ({}, "weight_map"),
        ([], "JSON object"),
    ],
)
def test_a_broken_index_says_what_is_wrong(folder, index, says):
    with pytest.raises(UserError) as error:
        HubCheckpoint(shards(folder, index))
    assert says in one_line(error)


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_fp8_per_channel(folder, scale_dtype):
    stored = RNG.standard_normal((4, 6)).astype(ml_dtypes.float8_e4m3fn)
    scale = np.array([[0.5], [0.25], [2], [1]], scale_dtype)
    arrays = {"p.weight": stored, "p.weight_scale": scale, "n.weight": FLOATS["norm.weight"]}
    checkpoint = HubCheckpoint(folder(arrays, quantization_config=PER_CHANNEL))
    assert set(checkpoint.names()) == {"p.weight", "n.weight"} and "quantization_config" not in checkpoint.config
    array = checkpoint.read("p.weight")
    assert array.format.name == "fp8" and array.scale.dtype == np.float32
    np.testing.assert_array_equal(dequantize(array), stored.astype(np.float32) * scale.astype(np.float32))


@pytest.mark.parametrize(
    "scale", [None, np.ones((2, 2), np.float32), np.ones((4, 2), np.float32), np.ones((4, 1), np.int64)]
)
def test_fp8_with_other_scales_is_refused(folder, scale):
    arrays = {"p.weight": np.ones((4, 6), ml_dtypes.float8_e4m3fn)}
    arrays |= {} if scale is None else {"p.weight_scale": scale}
    checkpoint = HubCheckpoint(folder(arrays, quantization_config=PER_CHANNEL))
    with pytest.raises(UserError) as error:
        checkpoint.read("p.weight")
    assert "'p.weight_scale'" in one_line(error)


def group(**changes):
    one = PER_CHANNEL["config_groups"]["group_0"]
    return PER_CHANNEL | {"config_groups": {"group_0": one | changes}}


@pytest.mark.parametrize(
    ("quantization", "says"),
    [
        ({"quant_method": "gptq", "bits": 4}, "'gptq'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128]"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "activation_scheme 'static'"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "mxfp4", "rotation": 4}, "'rotation'"),
        (PER_CHANNEL | {"format": "pack-quantized"}, "'pack-quantized' weights of 8 bits"),
        (PER_CHANNEL | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized'"),
        (PER_CHANNEL | {"sparsity_config": {"format": "dense"}}, "sparsity_config"),
        (PER_CHANNEL | {"spin": 1}, "'spin'"),
        (PER_CHANNEL | {"ignore": ["re:("]}, "'re:('"),
        (PER_CHANNEL | {"ignore": "lm_head"}, "'ignore'"),
        (PER_CHANNEL | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (PER_CHANNEL | {"config_groups": {}}, "config_groups"),
        (group(weights={"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": False}), "symmetric False"),
        (group(weights={"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True}), "token"),
        (group(weights={"num_bits": 8, "type": "float", "actorder": "group"}), "actorder 'group'"),
        (group(weights=None), "without weights"),
        (group(output_activations={"num_bits": 8}), "output_activations"),
        (group(input_activations={"num_bits": 8, "dynamic": False}), "static input_activations"),
        ("fp8", "quantization_config"),
    ],
)
def test_another_quantisation_is_named(folder, quantization, says):
    path = folder(quantization_config=quantization)
    for reader in (HubCheckpoint, read_config):
        with pytest.raises(UserError) as error:
            reader(path)
        assert says in one_line(error)


def test_an_unsupported_dtype_and_a_missing_tensor_are_named(folder):
    checkpoint = HubCheckpoint(folder({"ids": np.arange(3)}))
    assert checkpoint.shape("ids") == (3,)
    for ask, name, says in ((checkpoint.stored, "ids", "'ids' is I64"), (checkpoint.read, "ids", "'ids' is I64"),
                            (checkpoint.shape, "x", "'x'"), (checkpoint.read, "x", "'x'")):  # fmt: skip
        with pytest.raises(UserError) as error:
            ask(name)
        assert says in one_line(error)


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"\x05\0\0", "3 bytes"),
        (struct.pack("<Q", 1 << 63) + bytes(8), "beyond the end"),
        (struct.pack("<Q", 9) + bytes(8), "beyond the end"),
        (pack(b"{'a'"), "not valid JSON"),
        (pack(b"[]"), "JSON object"),
        (pack(b"[" * 100_000), "not valid JSON"),
        (pack(b"\xff\xff"), "UTF-8"),
        (pack(b'{"a": {}, "a": {}}'), "given twice"),
        (pack({"a": []}), "'a' has no proper shape"),
        (pack({"a": entry(shape=[-2])}, bytes(8)), "'a' has no proper shape"),
        (pack({"a": entry(shape=[2.0])}, bytes(8)), "'a' has no proper shape"),
        (pack({"a": entry(shape=[1 << 62, 0], data_offsets=[0, 0])}), "'a' has no proper shape"),
        (pack({"a": entry(shape=[1] * 70)}, bytes(8)), "'a' has no proper shape"),
        (pack({"a": entry(data_offsets=[0])}, bytes(8)), "'a' has no proper shape"),
        (pack({"a": entry(data_offsets=[8, 0])}, bytes(8)), "takes 8 bytes, not -8"),
        (pack({"a": entry(dtype="F4")}, bytes(8)), "unknown dtype 'F4'"),
        (pack({"a": entry(dtype=4)}, bytes(8)), "unknown dtype 4"),
        (pack({"a": entry(shape=[3])}, bytes(8)), "takes 12 bytes, not 8"),
        (pack({"a": entry()}, bytes(7)), "promises 8 bytes of tensors and it holds 7"),
        (pack({"a": entry()}, bytes(9)), "promises 8 bytes of tensors and it holds 9"),
        (pack({"a": entry(data_offsets=[8, 16])}, bytes(16)), "'a' begins at byte 8"),
        (pack({"a": entry(), "b": entry(data_offsets=[4, 12])}, bytes(12)), "'b' begins at byte 4"),
        (pack({"a": entry(), "b": entry()}, bytes(8)), "'b' begins at byte 0"),
    ],
)
def test_a_broken_file_says_what_is_wrong(folder, data, says):
    path = folder(data)
    with pytest.raises(UserError) as error:
        HubCheckpoint(path)
    assert says in one_line(error) and str(path) in str(error.value)


def test_a_folder_that_is_not_one(tmp_path, folder):
    with pytest.raises(UserError, match="there is no"):
        HubCheckpoint(tmp_path / "missing")
    with pytest.raises(UserError, match=r"has no config\.json"):
        HubCheckpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="neither model.safetensors nor"):
        HubCheckpoint(tmp_path)


@pytest.mark.parametrize(("text", "says"), [("{", "not valid JSON"), ("[1]", "JSON object"), ("\xff", "UTF-8")])
def test_a_broken_config_says_what_is_wrong(folder, text, says):
    path = folder()
    (path / "config.json").write_bytes(text.encode("latin-1"))
    for reader in (HubCheckpoint, read_config):
        with pytest.raises(UserError) as error:
            reader(path)
        assert says in one_line(error) and "config.json" in str(error.value)


def test_damage_gives_a_message_or_a_readable_file(folder):
    path = folder()
    whole = content(FLOATS)
    (header,) = struct.unpack_from("<Q", whole)
    changes = st.lists(st.tuples(st.integers(0, 8 + header - 1), st.integers(0, 255)), max_size=3)

    @settings(max_examples=300, deadline=None)
    @given(changes, st.integers(0, len(whole)))
    def check(changes, length):
        data = bytearray(whole)
        for at, byte in changes:
            data[at] = byte
        (path / "model.safetensors").write_bytes(data[:length] if not changes else data)
        try:
            checkpoint = HubCheckpoint(path)
            for name in checkpoint.names():
                assert checkpoint.read(name).values.shape == checkpoint.shape(name)
        except UserError as error:
            assert str(error) and "\n" not in str(error)

    check()
