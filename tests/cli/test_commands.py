"""What the commands print and write, against `support.forward` and the files they were given."""

import json
import os
import shutil
import signal
import threading
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
from support import checkpoint, forward, greedy

from jaxwafer.cli import main
from jaxwafer.ops.backends import OPERATIONS

EXACT = ("--dtype", "f32", "--kv-cache", "f32")
PROMPTS = [[5, 17, 3], [99, 4]]
COUNT = 6


def words(ids: list[int]) -> str:
    return " ".join(f"t{i}" for i in ids)


def prompts(*lists: list[int]) -> list[str]:
    return [word for ids in lists for word in ("--prompt", words(ids))]


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    return [greedy(checkpoint(), ids, COUNT) for ids in PROMPTS]


@pytest.fixture
def decode(folder, jaxwafer):
    """Runs `decode` on the folder: (stdout, the report)."""

    def run(*argv: str) -> tuple[str, dict]:
        status, out, err = jaxwafer("decode", "m", *EXACT, "--max-new-tokens", COUNT, "--json", "r.json", *argv)
        assert (status, err) == (0, "")
        assert sorted(os.listdir()) == sorted({"m", "r.json"} | {w for w in argv if w.endswith(".jsonl")})
        return out, json.loads(Path("r.json").read_text())

    return run


@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
def test_one_prompt_streams_its_text_and_a_report(decode, expected, mesh):
    out, report = decode(*prompts(PROMPTS[0]), "--mesh", mesh)
    assert out.startswith(words(expected[0]) + "\n")
    assert f"m on {mesh} (cpu)" in out
    (output,) = report["outputs"]
    assert output["prompt"] == words(PROMPTS[0]) and output["prompt_tokens"] == 3
    assert output["tokens"] == expected[0] and output["text"] == words(expected[0])
    assert output["finish_reason"] == "length"
    assert report["totals"]["prefill_tokens"] == 3
    # The first token comes out of prefill.
    assert report["totals"]["decode_tokens"] == COUNT - 1
    wafers, cores = map(int, mesh.split("x"))
    assert report["mesh"] == {"wafers": wafers, "cores": cores, "device": "cpu"}


def test_several_prompts_are_numbered_and_each_as_if_alone(decode, expected):
    out, report = decode(*prompts(*PROMPTS), "--micro-batch", "2")
    for number, (ids, tokens) in enumerate(zip(PROMPTS, expected, strict=True), 1):
        assert f"[{number}] {words(ids)}\n{words(tokens)}\n\n" in out
    assert [output["tokens"] for output in report["outputs"]] == expected


def test_a_prompts_file_follows_the_prompts_of_the_command_line(decode, expected):
    line = {"prompt": words(PROMPTS[1]), "max_new_tokens": 2}
    Path("p.jsonl").write_text(json.dumps(words(PROMPTS[0])) + "\n\n" + json.dumps(line) + "\n")
    _, report = decode(*prompts(PROMPTS[1]), "--prompts-file", "p.jsonl")
    assert [o["tokens"] for o in report["outputs"]] == [expected[1], expected[0], expected[1][:2]]


def test_text_ends_before_a_stop_text(decode, expected):
    first = expected[0]
    end = first.index(first[3])
    out, report = decode(*prompts(PROMPTS[0]), "--stop", f" t{first[3]}")
    text = words(first[:end])
    assert out.startswith(text + "\n")
    assert report["outputs"][0]["finish_reason"] == "stop"
    assert report["outputs"][0]["text"] == text


def test_end_tokens_end_a_text_unless_they_are_ignored(folder, decode, expected):
    first = expected[0]
    end = first.index(first[2])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [100, first[2]]}))
    _, report = decode(*prompts(PROMPTS[0]))
    assert report["outputs"][0]["tokens"] == first[:end] and report["outputs"][0]["finish_reason"] == "stop"
    _, report = decode(*prompts(PROMPTS[0]), "--ignore-eos")
    assert report["outputs"][0]["tokens"] == first and report["outputs"][0]["finish_reason"] == "length"


def test_samples_depend_on_the_seed_alone(decode):
    def tokens(seed: int, *lists: list[int]) -> list[list[int]]:
        _, report = decode(*prompts(*lists), "--temperature", "1.5", "--seed", str(seed))
        return [output["tokens"] for output in report["outputs"]]

    (once,), (again,), (other,) = tokens(3, PROMPTS[0]), tokens(3, PROMPTS[0]), tokens(4, PROMPTS[0])
    assert once == again != other
    assert tokens(3, PROMPTS[0], PROMPTS[0]) == [once, other]


def test_a_chat_template_is_applied_unless_the_prompt_is_raw(folder, decode, expected):
    (folder / "chat_template.jinja").write_text("t99 {{ messages[0]['content'] }}")
    _, report = decode(*prompts([4]))
    assert report["outputs"][0]["tokens"] == expected[1]
    _, report = decode(*prompts(PROMPTS[0]), "--raw")
    assert report["outputs"][0]["tokens"] == expected[0]


def test_reports_are_written_through_a_link_and_into_a_pipe(folder, jaxwafer):
    Path("link.json").symlink_to("real.json")
    os.mkfifo("pipe")
    read = []
    reader = threading.Thread(target=lambda: read.append(Path("pipe").read_text()))
    reader.start()
    run = ("decode", "m", *EXACT, *prompts([1]), "--max-new-tokens", "1")
    assert jaxwafer(*run, "--json", "link.json")[0] == 0
    assert jaxwafer(*run, "--json", "pipe")[0] == 0
    reader.join()
    assert Path("link.json").is_symlink() and Path("pipe").is_fifo()
    written = [json.loads(text)["outputs"][0]["tokens"] for text in (Path("real.json").read_text(), *read)]
    assert written == [greedy(checkpoint(), [1], 1)] * 2


def test_score_gives_the_likelihood_of_a_text(folder, jaxwafer):
    ids = np.random.default_rng(0).integers(0, 101, 30).tolist()
    Path("text").write_text(words(ids))
    status, out, err = jaxwafer("score", "m", *EXACT, "--file", "text", "--tokens", "20", "--json", "s.json")
    logits = forward(checkpoint(), ids[:20])[:-1]
    likelihoods = logits[np.arange(19), ids[1:20]] - np.log(np.exp(logits).sum(-1))
    mean = -likelihoods.mean()
    assert (status, err) == (0, "")
    assert out == f"20 tokens: mean NLL {mean:.4f}, perplexity {np.exp(mean):.3f}\n"
    report = json.loads(Path("s.json").read_text())
    assert report["tokens"] == ids[:20]
    np.testing.assert_allclose(report["log_likelihoods"], likelihoods, atol=2e-5)
    assert report["nll"] == pytest.approx(mean, abs=2e-5)


def test_inspect_counts_the_bytes_of_the_file(folder, jaxwafer):
    status, out, err = jaxwafer("inspect", "m")
    tensors = checkpoint().tensors
    total = sum(t.nbytes for t in tensors.values())
    assert (status, err) == (0, "")
    assert f"{total:,} bytes, as in the checkpoint" in out
    assert f"{sum(t.size for t in tensors.values()):,}" in out
    # 5 layers, keys and values of 3 heads of 16; fp8 adds a scale of a byte to each head's row.
    for name, nbytes in (("f32", 5 * 2 * 3 * 16 * 4), ("bf16", 5 * 2 * 3 * 16 * 2), ("fp8", 5 * 2 * 3 * 17)):
        (line,) = [line for line in out.splitlines() if f"KV a token, {name} " in line]
        assert f" {nbytes:,} bytes" in line


def test_inspect_needs_no_weights(folder, jaxwafer):
    (folder / "model.safetensors").unlink()
    total = sum(t.nbytes for t in checkpoint().tensors.values())
    for name in ("m", "m/config.json"):
        status, out, err = jaxwafer("inspect", name)
        assert (status, err) == (0, "") and f"{total:,} bytes, by the config alone" in out


def test_inspect_counts_the_blocks_of_a_gguf_file(write_gguf, jaxwafer):
    path, _ = write_gguf("Q4_1")
    held = {"int4-min": 0, "f32": 0}
    for tensor in gguf.GGUFReader(path).tensors:
        held["int4-min" if tensor.tensor_type.name == "Q4_1" else "f32"] += int(tensor.n_bytes)
    _, out, _ = jaxwafer("inspect", path)
    for form, nbytes in held.items():
        (line,) = [line for line in out.splitlines() if f"weights {form} " in line]
        assert f" {nbytes:,} bytes" in line
    assert f"{sum(held.values()):,} bytes, as in the checkpoint" in out


def test_devices_names_what_runs_each_operation(jaxwafer):
    status, out, err = jaxwafer("devices")
    assert (status, err) == (0, "")
    assert "16 x cpu" in out
    assert all(any(operation in line for line in out.splitlines()) for operation in OPERATIONS)


@pytest.mark.parametrize("command", ["decode", "fetch", "inspect", "devices", "score"])
def test_every_command_has_help(jaxwafer, command):
    status, out, err = jaxwafer(command, "--help")
    assert (status, err) == (0, "") and f"usage: jaxwafer {command}" in out
    assert command in jaxwafer("--help")[1]


def test_an_interrupt_that_a_callback_lost_comes_once_more():
    main._unraisable(SimpleNamespace(exc_type=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        signal.pause()


def test_convert_writes_a_folder_that_decodes_to_the_same_tokens(decode, expected, jaxwafer):
    status, out, err = jaxwafer("convert", "m", "m/again", "--weights", "f32", "--shard-bytes", "30000")
    assert (status, err) == (0, "")
    assert out.startswith("m/again: ") and out.endswith(" of tensors\n")
    shutil.copytree("m/again", "other")
    shutil.rmtree("m")
    Path("other").rename("m")
    _, report = decode(*prompts(PROMPTS[0]))
    assert report["outputs"][0]["tokens"] == expected[0]
