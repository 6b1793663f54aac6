"""GGUF files against the `gguf` library: values, names, configs, and every way a file can be broken."""

import struct

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxwafer.checkpoint.gguf import GGUFCheckpoint
from jaxwafer.checkpoint.open import open_config
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.quant.convert import dequantize

from .conftest import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, MLP, one_line, vocabulary

FORMATS = {"F32": "f32", "F16": "f16", "BF16": "bf16", "Q4_0": "int4", "Q4_1": "int4-min", "Q8_0": "int8-g32"}
HEADS_OF = {"blk.0.attn_q.weight": HEADS, "blk.0.attn_k.weight": KV_HEADS}
NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    "blk.0.attn_norm.weight": "model.layers.0.input_layernorm.weight",
    "blk.0.attn_q.weight": "model.layers.0.self_attn.q_proj.weight",
    "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
    "blk.0.attn_v.weight": "model.layers.0.self_attn.v_proj.weight",
    "blk.0.attn_output.weight": "model.layers.0.self_attn.o_proj.weight",
    "blk.0.ffn_norm.weight": "model.layers.0.post_attention_layernorm.weight",
    "blk.0.ffn_gate.weight": "model.layers.0.mlp.gate_proj.weight",
    "blk.0.ffn_up.weight": "model.layers.0.mlp.up_proj.weight",
    "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
}


def hub_rows(matrix: np.ndarray, heads: int) -> np.ndarray:
    """Row h·D + 2i + t of a GGUF file (head h, pair i, member t) is row h·D + t·D/2 + i on the hub."""
    out, size = np.empty_like(matrix), len(matrix) // heads
    for row in range(len(matrix)):
        head, within = divmod(row, size)
        pair, member = divmod(within, 2)
        out[head * size + member * (size // 2) + pair] = matrix[row]
    return out


@pytest.mark.parametrize("kind", FORMATS)
def test_every_type_has_the_values_of_the_gguf_library(write_gguf, kind):
    path, _ = write_gguf(kind)
    checkpoint = GGUFCheckpoint(path)
    stored = gguf.GGUFReader(path).tensors
    assert {NAMES[t.name] for t in stored} == set(checkpoint.names())
    for tensor in stored:
        name = NAMES[tensor.name]
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])
        if tensor.name in HEADS_OF:
            expected = hub_rows(expected, HEADS_OF[tensor.name])
        array = checkpoint.read(name)
        assert array.format == checkpoint.stored(name)
        assert array.format.name == (FORMATS[kind] if expected.ndim == 2 else "f32")
        assert checkpoint.shape(name) == expected.shape
        np.testing.assert_array_equal(dequantize(array), expected)


def test_a_block_by_hand(write_gguf):
    # One row of Q4_1: scale 2, minimum -1, nibble i of the first half is i, of the second 15 - i.
    nibbles = np.concatenate([np.arange(16), 15 - np.arange(16)])
    block = struct.pack("<ee", 2.0, -1.0) + bytes(i | (15 - i) << 4 for i in range(16))
    path, tensors = write_gguf("Q4_1")
    data = bytearray(path.read_bytes())
    start = next(t.data_offset for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_up.weight")
    data[start : start + 20] = block
    path.write_bytes(data)
    array = GGUFCheckpoint(path).read("model.layers.0.mlp.up_proj.weight")
    np.testing.assert_array_equal(array.values[0, :16], nibbles[0::2] | nibbles[1::2] << 4)
    assert array.values.shape == (MLP, HIDDEN // 2) and array.scale.shape == array.minimum.shape == (MLP, 2)
    np.testing.assert_array_equal(dequantize(array)[0, :32], 2.0 * nibbles - 1)


def test_rotating_pairs_and_rotating_halves_give_the_same_scores(write_gguf):
    """What the permutation of query and key rows is for: q·k after RoPE, in the file's order and in the hub's."""
    path, tensors = write_gguf("F32")
    checkpoint = GGUFCheckpoint(path)
    x = np.random.default_rng(1).standard_normal((2, HIDDEN))
    rope = spec_from_config(checkpoint.config).layers[0].mixer.rope
    angle = np.outer([5, 3], rope.frequencies())[:, None]

    def heads(matrix):
        return (x @ np.asarray(matrix, np.float64).T).reshape(2, -1, HEAD_DIM)

    def rotate(first, second):
        return first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)

    def pairs(name):
        y = heads(tensors[name])
        return np.stack(rotate(y[..., 0::2], y[..., 1::2]))

    def halves(name):
        y = heads(checkpoint.read(NAMES[name]).values)
        return np.stack(rotate(y[..., : HEAD_DIM // 2], y[..., HEAD_DIM // 2 :]))

    def scores(form):
        q, k = form("blk.0.attn_q.weight")[:, 0], form("blk.0.attn_k.weight")[:, 1]
        return np.einsum("tkgi,tki->kg", q.reshape(2, KV_HEADS, -1, HEAD_DIM // 2), k)

    np.testing.assert_allclose(scores(halves), scores(pairs), rtol=1e-12)


def test_config_is_what_the_hub_would_say(write_gguf):
    path, _ = write_gguf("Q4_0")
    config = GGUFCheckpoint(path).config
    assert config["rms_norm_eps"] == 1e-5 and config["rope_theta"] == 100000.0
    spec = spec_from_config(config)
    mixer, mlp = spec.layers[0].mixer, spec.layers[0].mlp
    assert (spec.hidden, spec.vocab, len(spec.layers), spec.tied) == (HIDDEN, len(vocabulary()[0]), 1, True)
    assert (mixer.heads, mixer.kv_heads, mixer.head_dim, mlp.intermediate) == (HEADS, KV_HEADS, HEAD_DIM, MLP)
    assert spec.max_context == 128


@pytest.mark.parametrize(("kind", "native"), [("F32", "f32"), ("F16", "f16"), ("BF16", "bf16")])
def test_an_unquantised_file_says_its_dtype(write_gguf, kind, native):
    assert spec_from_config(GGUFCheckpoint(write_gguf(kind)[0]).config).native == native


def test_an_output_matrix_means_an_untied_head(write_gguf):
    def add_head(tensors):
        tensors["output.weight"] = tensors["token_embd.weight"] + 1

    path, tensors = write_gguf(edit=add_head)
    checkpoint = GGUFCheckpoint(path)
    assert not spec_from_config(checkpoint.config).tied
    np.testing.assert_array_equal(checkpoint.read("lm_head.weight").values, tensors["output.weight"])


def test_every_weight_the_model_declares_is_in_the_file(write_gguf):
    checkpoint = GGUFCheckpoint(write_gguf("Q8_0")[0])
    spec = spec_from_config(checkpoint.config)
    layer = spec.layers[0]
    for weight in layer.mixer.weights() + layer.mlp.weights():
        assert checkpoint.shape(f"model.layers.0.{weight.hub}") == weight.shape
    for weight in spec.globals():
        assert checkpoint.shape(weight.hub) == weight.shape


def llama3_divisors(theta: float, factor: float) -> np.ndarray:
    """Llama 3's rule by wavelength, as its reference code states it."""
    out = []
    for i in range(0, HEAD_DIM, 2):
        wavelength = 2 * np.pi * theta ** (i / HEAD_DIM)
        if wavelength < 8192 / 4:
            out.append(1.0)
        elif wavelength > 8192:
            out.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            out.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(out, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_rope_divisors_of_llama_3_become_its_scaling(write_gguf, factor):
    divisors = llama3_divisors(500000.0, factor)
    assert 1 < len(set(divisors.tolist())) and 1 in divisors and factor in divisors
    path, _ = write_gguf(
        edit=lambda t: t.update({"rope_freqs.weight": divisors}), metadata={"llama.rope.freq_base": 500000.0}
    )
    checkpoint = GGUFCheckpoint(path)
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    frequencies = spec_from_config(checkpoint.config).layers[0].mixer.rope.frequencies()
    plain = 500000.0 ** -(np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    np.testing.assert_allclose(frequencies, plain / divisors, rtol=1e-6)
    assert "rope_freqs.weight" not in set(checkpoint.names())


def test_rope_divisors_of_one_mean_no_scaling(write_gguf):
    path, _ = write_gguf(edit=lambda t: t.update({"rope_freqs.weight": np.ones(HEAD_DIM // 2, np.float32)}))
    assert GGUFCheckpoint(path).config["rope_scaling"] is None


@pytest.mark.parametrize(
    "divisors",
    [
        np.linspace(1, 8, HEAD_DIM // 2),
        llama3_divisors(500000.0, 8.0)[:-1],
        np.full(HEAD_DIM // 2, np.nan),
        np.zeros(HEAD_DIM // 2),
    ],
)
def test_other_rope_divisors_are_refused(write_gguf, divisors):
    path, _ = write_gguf(
        edit=lambda t: t.update({"rope_freqs.weight": divisors.astype(np.float32)}),
        metadata={"llama.rope.freq_base": 500000.0},
    )
    with pytest.raises(UserError) as error:
        GGUFCheckpoint(path)
    assert "'rope_freqs.weight'" in one_line(error)


@pytest.mark.parametrize(
    ("metadata", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama.rope.scaling.factor": 4.0}, "llama.rope.scaling.factor"),
        ({"llama.rope.dimension_count": 16}, "llama.rope.dimension_count"),
        ({"llama.expert_count": 8}, "llama.expert_count"),
        ({"llama.attention.sliding_window": 64}, "llama.attention.sliding_window"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"split.count": [1, 2]}, "parts"),
        ({"general.architecture": [1, 2]}, "architecture"),
        ({"llama.rope.scaling.type": [1, 2]}, "llama.rope.scaling.type"),
        ({"llama.block_count": None}, "llama.block_count"),
        ({"llama.block_count": 2}, "2 layers"),
        ({"llama.block_count": 4_000_000_000}, "4000000000 layers"),
        ({"llama.block_count": "one"}, "llama.block_count"),
        ({"llama.attention.head_count": 0}, "llama.attention.head_count"),
        ({"llama.attention.head_count": 8}, "attn_q.weight"),
        ({"llama.attention.head_count_kv": [2]}, "llama.attention.head_count_kv"),
        ({"llama.attention.key_length": 4_000_000_000}, "length"),
        ({"llama.embedding_length": 4_000_000_000}, "token_embd.weight"),
        ({"llama.feed_forward_length": 64}, "ffn_"),
        ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base"),
        ({"llama.attention.layer_norm_rms_epsilon": 0.0}, "layer_norm_rms_epsilon"),
        ({"llama.vocab_size": 7}, "llama.vocab_size"),
        ({"general.alignment": 24}, "general.alignment"),
    ],
)
def test_metadata_that_is_wrong_or_not_understood_is_named(write_gguf, metadata, named):
    path, _ = write_gguf(metadata=metadata) if "general.alignment" not in metadata else _with_alignment(write_gguf)
    with pytest.raises(UserError) as error:
        GGUFCheckpoint(path)
    assert named in one_line(error)


def _with_alignment(write_gguf):
    path, tensors = write_gguf(metadata={"general.alignmenx": 24})
    path.write_bytes(path.read_bytes().replace(b"general.alignmenx", b"general.alignment"))
    return path, tensors


def test_another_architecture_is_named(write_gguf):
    path, _ = write_gguf(architecture="qwen2")
    with pytest.raises(UserError) as error:
        GGUFCheckpoint(path)
    assert "'qwen2'" in one_line(error)


def test_an_unknown_tensor_is_named(write_gguf):
    path, _ = write_gguf(edit=lambda t: t.update({"blk.0.attn_sinks.weight": np.ones(4, np.float32)}))
    with pytest.raises(UserError) as error:
        GGUFCheckpoint(path)
    assert "'blk.0.attn_sinks.weight'" in one_line(error)


def test_biases_reach_the_config_so_that_the_family_can_refuse_them(write_gguf):
    path, _ = write_gguf(edit=lambda t: t.update({"blk.0.attn_q.bias": np.ones(HEADS * HEAD_DIM, np.float32)}))
    config = GGUFCheckpoint(path).config
    assert config["attention_bias"] is True
    with pytest.raises(UserError, match="attention_bias"):
        spec_from_config(config)


def test_an_unsupported_type_is_named_with_its_tensor(write_gguf):
    path, _ = write_gguf(types={"blk.0.ffn_up.weight": "Q5_0"})
    with pytest.raises(UserError) as error:
        GGUFCheckpoint(path)
    assert "'blk.0.ffn_up.weight' is Q5_0" in one_line(error)


def test_a_quantised_vector_is_refused(write_gguf):
    path, _ = write_gguf(types={"output_norm.weight": "Q8_0"})
    with pytest.raises(UserError) as error:
        GGUFCheckpoint(path).read("model.norm.weight")
    assert "'output_norm.weight'" in one_line(error)


def test_a_tensor_that_is_not_there_is_named(write_gguf):
    checkpoint = GGUFCheckpoint(write_gguf()[0])
    for ask in (checkpoint.shape, checkpoint.stored, checkpoint.read):
        with pytest.raises(UserError) as error:
            ask("model.layers.7.mlp.up_proj.weight")
        assert "'model.layers.7.mlp.up_proj.weight'" in one_line(error)


HEADER = b"GGUF" + struct.pack("<I", 3)


def string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "empty"),
        (b"GG", "2 bytes left"),
        (b"GGML" + bytes(40), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(16), "version 1 "),
        (b"GGUF" + struct.pack(">I", 3) + bytes(16), "big-endian"),
        (HEADER + struct.pack("<QQ", 0, 0), "architecture None"),
        (HEADER + struct.pack("<QQ", 0, 1 << 62), f"{1 << 62} metadata entries"),
        (HEADER + struct.pack("<QQ", 1 << 62, 0), f"{1 << 62} tensors"),
        (HEADER + struct.pack("<QQ", 0, 1) + struct.pack("<Q", 1 << 63) + bytes(99), "past the end"),
        (HEADER + struct.pack("<QQ", 0, 1) + string(b"\xff\xfe") + bytes(99), "UTF-8"),
        (HEADER + struct.pack("<QQ", 0, 1) + string(b"k") + struct.pack("<I", 99) + bytes(99), "unknown type 99"),
        (HEADER + struct.pack("<QQ", 0, 1) + string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60), "strings in 'k'"),
        (HEADER + struct.pack("<QQ", 0, 1) + string(b"k") + struct.pack("<IIQ", 9, 4, 1 << 61), "values in 'k'"),
        (HEADER + struct.pack("<QQ", 0, 1) + string(b"k") + struct.pack("<IIQ", 9, 9, 1), "unknown type 9"),
        (HEADER + struct.pack("<QQ", 0, 2) + 2 * (string(b"k") + struct.pack("<IB", 0, 1)), "twice"),
        (HEADER + struct.pack("<QQ", 1, 0) + string(b"t") + struct.pack("<I", 9) + bytes(99), "9 dimensions"),
        (HEADER + struct.pack("<QQ", 1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 0, 0, 0), "shape [0]"),
        (HEADER + struct.pack("<QQ", 1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 31, 3, 0), "cannot be Q4_1"),
        (HEADER + struct.pack("<QQ", 1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 8, 77, 0), "unknown type 77"),
        (HEADER + struct.pack("<QQ", 1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 8, 0, 0), "ends at byte"),
        (HEADER + struct.pack("<QQ", 1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 8, 0, 1 << 63), "ends at byte"),
        (
            HEADER + struct.pack("<QQ", 1, 0) + string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 4) + bytes(99),
            "not aligned",
        ),
        (
            HEADER + struct.pack("<QQ", 1, 0) + string(b"t") + struct.pack("<IQQQQIQ", 4, *[(1 << 64) - 1] * 4, 0, 0),
            "ends at byte",
        ),
        (
            HEADER + struct.pack("<QQ", 2, 0) + 2 * (string(b"t") + struct.pack("<IQIQ", 1, 1, 0, 0)) + bytes(99),
            "twice",
        ),
    ],
)
def test_a_broken_header_says_what_is_wrong(tmp_path, data, says):
    path = tmp_path / "broken.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError) as error:
        GGUFCheckpoint(path)
    assert says in one_line(error)


def test_a_file_cut_anywhere_is_refused(write_gguf):
    path, _ = write_gguf("Q8_0")
    data = path.read_bytes()
    # The writer pads the last tensor up to the alignment; those bytes alone may be lost.
    end = max(t.data_offset + t.n_bytes for t in gguf.GGUFReader(path).tensors)
    for cut in np.linspace(0, end - 1, 60, dtype=int):
        path.write_bytes(data[:cut])
        with pytest.raises(UserError) as error:
            GGUFCheckpoint(path)
        assert str(path) in one_line(error)


def test_paths_that_are_not_files_are_refused(tmp_path):
    for path in (tmp_path, tmp_path / "missing.gguf"):
        with pytest.raises(UserError) as error:
            GGUFCheckpoint(path)
        assert str(path) in one_line(error)


def test_a_damaged_header_gives_a_message_or_a_readable_file(write_gguf, tmp_path):
    path, _ = write_gguf("Q4_1")
    whole, damaged = path.read_bytes(), tmp_path / "damaged.gguf"
    header = min(t.data_offset for t in gguf.GGUFReader(path).tensors)
    damage = st.lists(st.tuples(st.integers(0, header - 1), st.integers(0, 255)), min_size=1, max_size=4)

    @settings(max_examples=300, deadline=None)
    @given(damage)
    def check(changes):
        content = bytearray(whole)
        for at, byte in changes:
            content[at] = byte
        damaged.write_bytes(content)
        try:
            checkpoint = GGUFCheckpoint(damaged)
            for name in checkpoint.names():
                assert dequantize(checkpoint.read(name)).size == np.prod(checkpoint.shape(name))
            spec_from_config(checkpoint.config)
            checkpoint.tokenizer().apply_chat([{"role": "user", "content": "hello 12"}])
        except UserError as error:
            assert str(error) and "\n" not in str(error)

    check()


def test_the_real_file(smollm2):
    checkpoint = GGUFCheckpoint(smollm2)
    config, plain = checkpoint.config, open_config("smollm2-135m")
    assert {k: config[k] for k in plain.keys() & config.keys()} == {k: plain[k] for k in plain.keys() & config.keys()}
    assert spec_from_config(config) == spec_from_config(plain)
    stored = {NAMES[t.name]: t for t in gguf.GGUFReader(smollm2).tensors if t.name in NAMES}
    for name, tensor in stored.items():
        expected = gguf.quants.dequantize(tensor.data[:576], tensor.tensor_type)
        heads = {"q": 9, "k": 3}.get(name.split(".")[-2][0]) if "self_attn" in name else None
        if heads:
            expected = hub_rows(expected, heads)
        np.testing.assert_array_equal(dequantize(checkpoint.read(name)[:576]), expected)
    spec = spec_from_config(config)
    for i, layer in enumerate(spec.layers):
        for weight in layer.mixer.weights() + layer.mlp.weights():
            assert checkpoint.shape(f"model.layers.{i}.{weight.hub}") == weight.shape
