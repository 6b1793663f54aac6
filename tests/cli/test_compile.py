"""`jaxwafer compile` for a TPU that is not here, and lowered for GPUs and CPUs. Without libtpu some is skipped."""

import importlib.util
import json
import subprocess
import sys
from functools import partial
from subprocess import PIPE

import pytest

from jaxwafer.cli.main import main
from jaxwafer.ops.attention import api as attention
from jaxwafer.roofline.lowered import collectives

libtpu = pytest.mark.skipif(
    not importlib.util.find_spec("libtpu"), reason="no libtpu here; pip install 'jaxwafer[tpu]'"
)
FIELDS = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "max_position_embeddings": 512, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FIELDS))
    return str(tmp_path)


@libtpu
def test_a_small_llama_compiles_and_its_arguments_are_what_is_declared(model, tmp_path, capfd):
    args = ["compile", model, "--target", "v5e:2x2", "--mesh", "2x2", "--weights", "int4", "--max-context", "256",
            "--prefill-chunk", "32", "--components", "--json", str(tmp_path / "report.json")]  # fmt: skip
    assert main(args) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    whole, parts = report["round"], report["round"]["components"]
    for bytes_of in ("counted_bytes", "xla_bytes"):
        assert sum(part[bytes_of] for part in parts.values()) == pytest.approx(whole[bytes_of])
    # Two layers' gate, up and down of 256 · 256 on a core, 4 bits and a scale of 16 for 32, and a norm: a matrix is
    # read once, and these are too small for XLA's other bytes not to show.
    assert parts["mlps"]["counted_bytes"] == 2 * (3 * 256 * 256 * 9 // 16 + 256 * 4)
    assert 1 <= parts["mlps"]["ratio"] < 3
    declared = sum(report["planned_bytes"].values())
    for program in report["programs"].values():
        # A TPU's memory is in tiles, to which these small arrays are rounded up.
        assert declared <= program["arguments"] < 3 * declared
        assert {c["kind"] for c in program["collectives"]} >= {"all-reduce", "collective-permute"}
    assert report["device"] == {"kind": "TPU v5 lite", "memory_bytes": 16e9}
    assert "bytes of a round, XLA" in capfd.readouterr().out


@libtpu
def test_two_processes_may_describe_a_topology_at_once():
    """libtpu would lock the second out, though neither takes a TPU."""
    code = "import sys; from jaxwafer.topology import tpu_target; from jaxwafer.mesh import MeshShape; "
    code += "print(tpu_target('v5e:2x2', MeshShape(2, 2)).kind, flush=True); sys.stdin.read()"
    start = partial(subprocess.Popen, [sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True)
    with start() as first, start() as second:
        assert [process.stdout.readline() for process in (first, second)] == ["TPU v5 lite\n"] * 2


def test_a_mesh_that_does_not_fit_the_topology_is_refused_without_libtpu(model, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)
    for target, mesh, message in (
        ("v5e:2x2", "3x2", "mesh 3x2 needs 6 devices, but v5e:2x2 has 4"),
        # Of this generation a chip is two devices.
        ("tpu7x:2x2x1", "3x3", "mesh 3x3 needs 9 devices, but tpu7x:2x2x1 has 8"),
        ("v5e:2x4", "3x2", "mesh 3x2 has 6 devices, which do not divide the 8 of v5e:2x4"),
    ):
        assert main(["compile", model, "--target", target, "--mesh", mesh]) == 2
        assert capfd.readouterr().err == f"jaxwafer: {message}\n"


@pytest.mark.parametrize("target", ["v9:2x2", "v5e", "h100", "v5e:0x2"])
def test_an_unknown_target_is_refused(target, model, capfd):
    assert main(["compile", model, "--target", target]) == 2
    error = capfd.readouterr().err
    assert error.startswith(f"jaxwafer: --target {target!r} is neither a TPU topology, such as v4:")
    assert error.endswith(", nor one of cuda, cpu\n")


def lowered(model, target, tmp_path, *flags) -> dict:
    args = ["compile", model, "--target", target, "--weights", "int4", "--kv-cache", "fp8", "--max-context", "256",
            "--prefill-chunk", "32", "--json", str(tmp_path / "report.json"), *flags]  # fmt: skip
    assert main(args) == 0
    return json.loads((tmp_path / "report.json").read_text())


@pytest.mark.parametrize("target", ["cuda", "cpu"])
def test_it_lowers_for_a_platform_that_is_not_here(target, model, tmp_path, capfd):
    report = lowered(model, target, tmp_path, "--mesh", "2x2")
    # Two layers on each of two wafers, of which a core has half: q and o of 256 · 128, k and v of 64 · 256, gate, up
    # and down of 256 · 256, in 4 bits with a scale of 16 for 32; two norms, and a quarter of embedding and head.
    matrices = 2 * (2 * 256 * 128 + 2 * 64 * 256 + 3 * 256 * 256) + 2 * 512 // 4 * 256
    assert report["planned_bytes"]["weights"] == matrices * 9 // 16 + (2 * 2 + 1) * 256 * 4
    # Two requests of 8 blocks of 32 tokens, two layers, one head of 64 bytes and an exponent, keys and values.
    assert report["planned_bytes"]["cache"] == 2 * 256 * 2 * 65 * 2
    assert report["round"]["counted_bytes"] > report["planned_bytes"]["weights"] * 0.9
    hidden = 256 * (2 if target == "cuda" else 4)
    for name, tokens in (("decode", 1), ("prefill of 32", 32)):
        program = report["programs"][name]
        assert program["module_bytes"] > 10_000 and program["seconds"] > 0
        sizes = {(c["kind"], c["bytes"]) for c in program["collectives"]}
        # The residual stream hops in its own type, and is summed over cores in float32.
        assert {("collective-permute", tokens * hidden), ("all-reduce", tokens * 256 * 4)} <= sizes
    backend, reason = report["backends"]["matmul int4"].values()
    if target == "cuda":
        assert (backend, reason) == ("gpu", "Pallas kernel by Triton")
        assert report["programs"]["decode"]["kernels"].keys() == {"__gpu$xla.gpu.triton"}
        assert report["backends"]["attention"]["backend"] in attention.BACKENDS
    elif backend == "cpu":
        assert any(kernel.startswith("jaxwafer_matmul_") for kernel in report["programs"]["decode"]["kernels"])
    assert report["unknown"] in " ".join(capfd.readouterr().out.replace("│", " ").split())


def test_it_lowers_what_the_planner_chose(model, tmp_path):
    plan = tmp_path / "plan.json"
    assert main(["plan", model, "--hardware", "wse-3", "--wafers", "2", "--cores", "2", "--json", str(plan)]) == 0
    report = lowered(model, "cpu", tmp_path, "--plan", str(plan))
    assert report["mesh"] == "2x2"


def test_collectives_are_read_from_stablehlo():
    text = """
    %1 = "stablehlo.all_reduce"(%0) <{channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      %c = stablehlo.add %a, %b : tensor<f32>
      stablehlo.return %c : tensor<f32>
    }) : (tensor<1x4x8xf32>) -> tensor<1x4x8xf32>
    %2 = "stablehlo.collective_permute"(%1) <{source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : \
(tensor<8xbf16>) -> tensor<8xbf16>
    %3 = "stablehlo.collective_permute"(%1) <{source_target_pairs = dense<[[0, 1]]> : tensor<1x2xi64>}> : \
(tensor<8xbf16>) -> tensor<8xbf16>
    %4 = "stablehlo.all_gather"(%2) <{all_gather_dim = 0 : i64}> : (tensor<4xi32>) -> tensor<8xi32>
    """
    found = collectives(text)
    assert found == {("all-reduce", 128): 1, ("collective-permute", 16): 2, ("all-gather", 32): 1}
