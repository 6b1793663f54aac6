"""What a quantization_config says of each module, and the bytes of published models by their configs alone."""

from pathlib import Path

import pytest

from jaxwafer.checkpoint.open import open_config, open_formats
from jaxwafer.checkpoint.quantization import read_quantization
from jaxwafer.model import spec_from_config
from jaxwafer.partition.placement import Placement, place
from jaxwafer.partition.plan import uniform

from . import packings


def planned(model: str) -> Placement:
    spec = spec_from_config(open_config(model))
    formats = open_formats(model, spec.native, "native")
    return place(spec, uniform(len(spec.layers), 1), formats, cores=1)


def test_bytes_of_a_layer_of_kimi_k3():
    """Experts of a layer are 15.72 GB, a KDA layer 16.99 and an MLA layer 16.57; here they are a little more, since
    vectors and routers are float32."""
    got = planned("kimi-k3")
    layer = {type(s.kind).__name__: got.layer_bytes(s) for s in (*got.mixers, *got.mlps)}
    moe = next(s for s in got.mlps if type(s.kind).__name__ == "MoE")
    experts = sum(s.wafer_bytes(1, 1) for s in moe.weights.values() if s.format.name == "mxfp4")
    assert experts == 896 * 3 * 3584 * 3072 * 17 // 32
    assert round(experts / 1e9, 2) == 15.72
    assert layer["KDA"] + layer["MoE"] == pytest.approx(16.99e9, rel=1e-3)
    assert layer["MLA"] + layer["MoE"] == pytest.approx(16.57e9, rel=1e-3)
    assert {n for n, s in moe.weights.items() if s.format.name == "bf16"} == {
        "latent_down", "latent_up", "shared_gate_proj", "shared_up_proj", "shared_down_proj",
    }  # fmt: skip


@pytest.mark.parametrize(
    "model, attention, mlp, gigabytes",
    [
        ("gpt-oss-20b", "bf16", "mxfp4", 13.8),
        ("gpt-oss-120b", "bf16", "mxfp4", 65.4),
        ("kimi-k2-thinking", "bf16", "int4-g32-bf16", 594.5),
        ("qwen3-32b-fp8", "fp8-g128", "fp8-g128", 35.3),
        ("qwen3-32b", "bf16", "bf16", 65.5),
    ],
)
def test_formats_and_bytes_of_published_models(model, attention, mlp, gigabytes):
    got = planned(model)
    assert got.mixers[0].weights["o"].format.name == attention
    assert got.mlps[-1].weights["down"].format.name == mlp
    assert got.globals["embedding"].format.name == got.globals["head"].format.name == "bf16"
    assert round(got.weight_bytes(0) / 1e9, 1) == gigabytes


def test_ignored_and_targeted_modules_of_compressed_tensors():
    config = packings.compressed("pack-quantized")
    config["config_groups"]["group_1"] = {
        "targets": ["re:.*up_proj", "model.one"],
        "weights": config["config_groups"]["group_0"]["weights"] | {"group_size": 64},
    }
    config["ignore"] += ["re:shared", "model.two"]
    got = read_quantization(config, Path("config.json"))
    # A regular expression has to fit from the beginning of the name.
    expected = {"lm_head": None, "model.one": 64, "model.two": None, "model.two.b": 32, "a.self_attn.q_proj": None,
                "x.up_proj": 64, "x.down_proj": 32, "x.shared": 32}  # fmt: skip
    schemes = {name: got.planned(name) for name in expected}
    assert {name: scheme and scheme.group for name, scheme in schemes.items()} == expected
    assert got.scheme("a.self_attn.q_proj").group == 32 and not got.dynamic


def test_modules_not_to_convert_of_transformers():
    names = ["model.layers.*.self_attn", "gate", "lm_head"]
    got = read_quantization({"quant_method": "mxfp4", "modules_to_not_convert": names}, Path("config.json"))
    kept = ["model.layers.3.self_attn.q_proj", "model.layers.0.mlp.gate", "lm_head"]
    assert [got.planned(n) for n in kept] == [None] * 3
    assert got.planned("model.layers.0.mlp.experts.gate_up_proj").kind == "mxfp4"


def test_a_block_size_is_read_from_the_config():
    fields = {"quant_method": "fp8", "weight_block_size": [64, 256]}
    scheme = read_quantization(fields, Path("config.json")).scheme("any")
    assert (scheme.rows, scheme.group, scheme.format("float32").name) == (64, 256, "fp8-g256")
    assert read_quantization({"quant_method": "fp8"}, Path("config.json")).scheme("any").format("").name == "fp8"
