"""`jaxwafer compile` for a TPU that is not here. What needs libtpu is skipped without it."""

import json

import pytest

from jaxwafer.cli.main import main

libtpu = pytest.mark.skipif(
    not __import__("importlib.util").util.find_spec("libtpu"), reason="no libtpu here; pip install 'jaxwafer[tpu]'"
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
            "--prefill-chunk", "32", "--json", str(tmp_path / "report.json")]  # fmt: skip
    assert main(args) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    declared = sum(report["planned_bytes"].values())
    for program in report["programs"].values():
        # A TPU's memory is in tiles, to which these small arrays are rounded up.
        assert declared <= program["arguments"] < 3 * declared
        assert {c["kind"] for c in program["collectives"]} >= {"all-reduce", "collective-permute"}
    assert report["device"] == {"kind": "TPU v5 lite", "memory_bytes": 16e9}
    assert "bytes of a round, XLA" in capfd.readouterr().out


@libtpu
def test_a_mesh_larger_than_the_topology_is_refused(model, capfd):
    assert main(["compile", model, "--target", "v5e:2x2", "--mesh", "3x2"]) == 2
    assert capfd.readouterr().err == "jaxwafer: mesh 3x2 needs 6 devices, but v5e:2x2 has 4\n"


@pytest.mark.parametrize("target", ["v9:2x2", "v5e", "h100"])
def test_an_unknown_target_is_refused(target, model, capfd):
    assert main(["compile", model, "--target", target]) == 2
    assert capfd.readouterr().err.startswith(f"jaxwafer: --target {target!r} is no TPU topology; give one such as v4:")
