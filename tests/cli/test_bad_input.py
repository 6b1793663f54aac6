"""Everything a user can get wrong: status 2 and one line that says what is wrong and what to do."""

import errno
import json
import os
import signal
import struct
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import jaxwafer as package
from jaxwafer.cli.decode import Decode
from jaxwafer.cli.score import Score

PROMPT = ("--prompt", "t5 t6", "--max-new-tokens", "2")
RUN = ("decode", "m", *PROMPT)


@pytest.mark.parametrize(
    "argv, message",
    [
        ([], "no command given; choose one of decode, fetch, inspect, plan, calibrate, devices, score, "
         "compile, bench, convert (see: jaxwafer --help)"),
        (["decod", "m"], "there is no command 'decod'; choose one of decode, "),
        (["--mesh", "1x1"], "there is no command '--mesh'; choose one of decode, "),
        (["inspect"], "inspect needs MODEL (see: jaxwafer inspect --help)"),
        (["score", "m"], "score needs MODEL and --file (see: jaxwafer score --help)"),
        (["fetch"], "fetch needs MODEL (see: jaxwafer fetch --help)"),
        (["convert"], "convert needs MODEL and OUT (see: jaxwafer convert --help)"),
        (["convert", "m", "m"], "m is already there: name a folder that is not"),
        ([*RUN, "--processes", "2"], "--coordinator, --processes and --process belong together: give all three or "),
        ([*RUN, "--coordinator", "a:1", "--processes", "2", "--process", "0"], "--coordinator, --processes and "
         "--process are for --distributed: give it too"),
        (["devices", "x"], "unrecognized options: x (see: jaxwafer devices --help)"),
        (["inspect", "m", "n"], "unrecognized options: n (see: jaxwafer inspect --help)"),
        (["decode", "m", "--promt", "x"], "decode has no flag --promt; perhaps --prompt (see: jaxwafer decode --help)"),
        (["decode", "--bogus=3"], "decode has no flag --bogus (see: jaxwafer decode --help)"),
        (["decode", "m", "--no-raw"], "decode has no flag --no-raw; perhaps --raw (see: jaxwafer decode --help)"),
        (["decode", "m", "--raw=x"], "unrecognized options: x (see: jaxwafer decode --help)"),
        (["decode", "m", "--prompt"], "missing value for argument '--prompt' (see: jaxwafer decode --help)"),
        (["decode", "m"], "no prompt: give --prompt TEXT or --prompts-file FILE"),
        (["decode", "--held-out", "0"], "held-out must be from 1 to 10000, not 0"),
        (["decode", "--held-out", "x"], "--held-out should be a whole number, not 'x' (see: jaxwafer decode --help)"),
        (["decode", "m", "--prompt", ""], "prompt 1 is empty"),
        (["decode", "m", "--prompt", "t1", "--prompt", " \n"], "prompt 2 is empty"),
        (["decode", "m", "--prompt", "\udcff"], "the text is not valid Unicode (a lone surrogate at character 0)"),
        (["decode", "m", "--prompt", "t1 " * 600], "prompt 1 has 600 tokens and may generate 128, but the model's "
         "context is 512: shorten the prompt or lower --max-new-tokens"),
        ([*RUN, "--max-context", "2"], "prompt 1 has 2 tokens and may generate 2, but --max-context is 2: shorten "),
        ([*RUN, "--max-context", "513"], "max-context 513 is more than the 512 positions the model has"),
        (["decode", "nope", *PROMPT], "there is no model 'nope'; give a folder, a .gguf file or one of: "),
        (["decode", "./nope", *PROMPT], "there is no nope; give a folder, a .gguf file or one of: "),
        (["inspect", "nope.gguf"], "there is no nope.gguf; give a folder, a .gguf file or one of: "),
        (["decode", "m/config.json", *PROMPT], "m/config.json is neither a folder nor a .gguf file; give the folder"),
        (["decode", "llama-3.1-8b", *PROMPT], "llama-3.1-8b is a config only: it can be planned but not run"),
        (["fetch", "llama-3.1-8b"], "llama-3.1-8b is a config only: there are no weights of it to fetch"),
        (["fetch", "nope"], "there is no model 'nope'; give "),
        ([*RUN, "--mesh", "5x4"], "mesh 5x4 needs 20 devices, but there are 16 cpu devices"),
        ([*RUN, "--mesh", "1000000x1000"], "mesh 1000000x1000 needs 1000000000 devices, but there are 16 cpu devices"),
        ([*RUN, "--mesh", "0x1"], "--mesh 0x1: wafers and cores must be at least 1"),
        ([*RUN, "--mesh=-1x2"], "--mesh -1x2: wafers and cores must be at least 1"),
        ([*RUN, "--mesh", "4"], "--mesh '4' is neither WxC (wafers x cores, such as 4x2), a TOML file nor one of: "),
        ([*RUN, "--weights", "INT4"], "unknown weight policy 'INT4'; choose one of native, mixed, int4, "),
        (["inspect", "m", "--weights", "x"], "unknown weight policy 'x'; choose one of native, "),
        ([*RUN, "--kv-cache", "int8"], "unknown KV cache format 'int8'; choose one of fp8, bf16, f32"),
        ([*RUN, "--dtype", "f16"], "unknown compute type 'f16'; choose one of auto, bf16, f32"),
        ([*RUN, "--stop", ""], "a stop text must not be empty"),
        ([*RUN, "--prompt", "t1", "--seed", "4294967295"], "seed must be from 0 to 2^32 - 1, not 4294967296"),
        ([*RUN, "--micro-batch", "9" * 12], "weights and KV cache take "),
        ([*RUN, "--json", "no/where.json"], "--json no/where.json: there is no folder "),
        ([*RUN, "--json", "."], "--json . cannot be written: give a file in a folder that is yours"),
        ([*RUN, "--trace", "m/config.json"], "cannot make the folder --trace m/config.json: File exists"),
        ([*RUN, "--mesh", "9" * 5000], "File name too long"),
        (["score", "m", "--file", "no.txt"], "cannot read --file no.txt: No such file or directory"),
        (["score", "m", "--file", "."], "cannot read --file .: Is a directory"),
        (["score", "m", "--file", "m/model.safetensors"], "--file m/model.safetensors is not UTF-8 text"),
        (["score", "m", "--file", "m/config.json", "--tokens", "1"], "--tokens must be at least 2, not 1"),
        (["score", "m", "--file", "m/config.json", "--json", "."], "--json . cannot be written: give a file in "),
    ],
)  # fmt: skip
def test_arguments(folder, refused, argv, message):
    line = refused(*argv)
    assert line.startswith(message) or (len(line) > 5000 and line.endswith(message))


WHOLE = ["micro-batch", "micro-batches", "max-new-tokens", "max-context", "prefill-chunk"]


@pytest.mark.parametrize("flag", WHOLE)
@pytest.mark.parametrize("value", ["0", "-3"])
def test_counts_are_at_least_one(folder, refused, flag, value):
    assert refused(*RUN, f"--{flag}={value}") == f"{flag} must be at least 1, not {value}"


@pytest.mark.parametrize("flag", [*WHOLE, "top-k", "seed"])
@pytest.mark.parametrize("value", ["1.5", "1e3", "x", "", "None"])
def test_counts_are_whole_numbers(folder, refused, flag, value):
    expected = f"--{flag} should be a whole number, not '{value}' (see: jaxwafer decode --help)"
    assert refused(*RUN, f"--{flag}={value}") == expected


def test_a_number_of_too_many_digits(folder, refused):
    assert refused(*RUN, "--seed", "9" * 5000) == "--seed has too many digits (see: jaxwafer decode --help)"


@pytest.mark.parametrize(
    "flag, value, message",
    [
        ("temperature", "nan", "temperature must be a number from 0 up, not nan"),
        ("temperature", "inf", "temperature must be a number from 0 up, not inf"),
        ("temperature", "-1", "temperature must be a number from 0 up, not -1.0"),
        ("top-p", "0", "top-p must be above 0 and at most 1, not 0.0"),
        ("top-p", "nan", "top-p must be above 0 and at most 1, not nan"),
        ("top-p", "1.1", "top-p must be above 0 and at most 1, not 1.1"),
        ("min-p", "-0.1", "min-p must be from 0 to 1, not -0.1"),
        ("top-k", "-1", "top-k must be 0 (off) or more, not -1"),
        ("seed", "-1", "seed must be from 0 to 2^32 - 1, not -1"),
    ],
)
def test_sampling_out_of_range(folder, refused, flag, value, message):
    assert refused(*RUN, f"--{flag}={value}") == message


@pytest.mark.parametrize("flag", ["temperature", "top-p", "min-p"])
def test_sampling_that_is_no_number(folder, refused, flag):
    assert refused(*RUN, f"--{flag}=x") == f"--{flag} should be a number, not 'x' (see: jaxwafer decode --help)"


@pytest.mark.parametrize("command", [Decode, Score])
def test_every_numeric_flag_is_tested_above(command):
    types = typing.get_type_hints(command)
    numeric = {name.replace("_", "-") for name, kind in types.items() if {kind, *typing.get_args(kind)} & {int, float}}
    # Those of many processes are refused as `Cluster` says, see tests/test_distributed.py.
    cluster = {"processes", "process", "timeout"}
    assert numeric <= {*WHOLE, *cluster, "held-out", "top-k", "seed", "temperature", "top-p", "min-p", "tokens"}


@pytest.mark.parametrize(
    "text, message",
    [
        ('"t1"\n{"prompt": 3}', "p.jsonl, line 2: prompt: Expected `str`, got `int`"),
        ('{"prompt": "t1", "temprature": 1}', "p.jsonl, line 1: Object contains unknown field `temprature`"),
        ('{"prompt": "t1", "top_k": 1.5}', "p.jsonl, line 1: top_k: Expected `int`, got `float`"),
        ('{"prompt": "t1"', "p.jsonl, line 1: Input data was truncated"),
        ("[" * 100_000, "p.jsonl, line 1: Expected `str | object`, got `array`"),
        ('{"prompt": "t1", "temperature": -1}', "temperature must be a number from 0 up, not -1"),
        ('"t1"\n\n""\n', "prompt 2 is empty"),
        ("\n", "no prompt: give --prompt TEXT or --prompts-file FILE"),
    ],
)
def test_prompts_files(folder, refused, text, message):
    Path("p.jsonl").write_text(text)
    assert refused("decode", "m", "--prompts-file", "p.jsonl").startswith(message)


def test_prompts_files_that_cannot_be_read(folder, refused):
    Path("p.jsonl").write_bytes(b"\xff\xfe")
    assert refused("decode", "m", "--prompts-file", "p.jsonl") == "--prompts-file p.jsonl is not UTF-8 text"
    reason = "cannot read --prompts-file no.jsonl: No such file or directory"
    assert refused("decode", "m", "--prompts-file", "no.jsonl") == reason


def without_end(data: bytes) -> bytes:
    return data[:-10]


def promise_more(data: bytes) -> bytes:
    """A header that says it is a gigabyte long."""
    return struct.pack("<Q", 1 << 30) + data[8:]


@pytest.mark.parametrize(
    "name, edit, message",
    [
        ("model.safetensors", without_end, "m/model.safetensors is truncated or damaged: its header promises "),
        ("model.safetensors", promise_more, "m/model.safetensors is truncated or damaged: its header of 1073741824 "),
        ("model.safetensors", lambda data: b"", "m/model.safetensors is empty; download it again"),
        ("model.safetensors", lambda data: data.replace(b'"F32"', b'"F33"', 1), "m/model.safetensors: tensor "),
        ("model.safetensors", lambda data: data.replace(b'"F32"', b'"I32"', 1), "m: tensor "),
        ("model.safetensors", None, "m has neither model.safetensors nor model.safetensors.index.json"),
        ("config.json", lambda data: data[:-1], "m/config.json is not valid JSON "),
        ("config.json", lambda data: b"[]", "m/config.json should hold a JSON object, not list"),
        ("config.json", None, "m has no config.json; give the folder of a Hugging Face checkpoint"),
        ("tokenizer.json", None, "m has no tokenizer.json (and no tiktoken.model); add it from the model's repository"),
        ("tokenizer.json", lambda data: b"{}", "m/tokenizer.json is not a tokenizer this version understands "),
    ],
)
def test_damaged_and_missing_files(folder, refused, name, edit, message):
    path = folder / name
    data = path.read_bytes()
    path.unlink()
    if edit:
        path.write_bytes(edit(data))
    assert refused(*RUN).startswith(message)
    if name == "model.safetensors" and edit:
        assert refused("inspect", "m").startswith(message)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture GPT2LMHeadModel is not supported (supported: "),
        ({"architectures": "LlamaForCausalLM"}, "config.json: 'architectures' should be a list of names, not "),
        ({"sliding_window": 4}, "config.json: 'sliding_window' is not understood and may change the maths; refusing"),
        ({"hidden_act": "gelu"}, "config.json: 'hidden_act' = 'gelu' is not supported (supported: ['silu'])"),
        ({"hidden_size": "48"}, "config.json: 'hidden_size' should be int, not '48'"),
        ({"hidden_size": 10**30}, "config.json: 'hidden_size' = 1000000000000000000000000000000 is more than any "),
        ({"num_hidden_layers": 10**9}, "config.json: 'num_hidden_layers' = 1000000000 is more than any model has"),
        ({"head_dim": 10**7}, "config.json: 6 attention heads of 10000000 are more than any model has"),
        ({"rms_norm_eps": 10**400}, "config.json: 'rms_norm_eps' should be float, not 1000"),
        ({"rms_norm_eps": -1.0}, "config.json: 'rms_norm_eps' must be positive, not -1.0"),
        ({"rope_theta": [1]}, "config.json: 'rope_theta' should be a positive number, not [1]"),
        ({"max_position_embeddings": "9"}, "config.json: 'max_position_embeddings' should be int, not '9'"),
        ({"torch_dtype": "int4"}, "config.json: dtype 'int4' is not supported (supported: bfloat16, "),
        ({"vocab_size": 100}, "m: model.embed_tokens.weight has shape [101, 48], but its config makes it 100 (vocab) "),
        ({"num_hidden_layers": 6}, "m has no tensor 'model.layers.5.input_layernorm.weight'"),
    ],
)
def test_configs(folder, refused, change, message):
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | change))
    assert refused("inspect", "m").startswith(message)
    assert refused(*RUN).startswith(message)


@pytest.mark.parametrize("ids", [10**12, -5, "x", [1, True]])
def test_end_tokens_that_are_no_ids(folder, refused, ids):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    message = "m/generation_config.json: 'eos_token_id' should be a token id or a list of them, not "
    assert refused(*RUN).startswith(message)


def test_a_chat_template_that_fails(folder, refused):
    (folder / "chat_template.jinja").write_text("{{ raise_exception('system prompts only') }}")
    assert refused(*RUN) == "the chat template of m failed: system prompts only"


@pytest.mark.parametrize("templates", [[{"name": ["default"], "template": 3}], [1]])
def test_chat_templates_without_a_default_are_none(folder, refused, templates):
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert refused(*RUN, "--max-context", "2").startswith("prompt 1 has 2 tokens")


@pytest.mark.parametrize(
    "edit, message",
    [
        (without_end, "tiny.gguf is truncated or damaged: tensor "),
        (lambda data: data[:1000], "tiny.gguf is truncated or damaged: "),
        (lambda data: data[:8] + struct.pack("<Q", 1 << 40) + data[16:], "tiny.gguf is truncated or damaged: the "),
        (lambda data: b"GGML" + data[4:], "tiny.gguf is not a GGUF file (it does not start with 'GGUF')"),
        (lambda data: data[:4] + struct.pack("<I", 9) + data[8:], "tiny.gguf: GGUF version 9 is not supported "),
        (lambda data: b"", "tiny.gguf is empty; download it again"),
    ],
)
def test_damaged_gguf_files(write_gguf, refused, monkeypatch, tmp_path, edit, message):
    monkeypatch.chdir(tmp_path)
    path, _ = write_gguf()
    path.write_bytes(edit(path.read_bytes()))
    assert refused("decode", "tiny.gguf", "--prompt", "hello").startswith(message)
    assert refused("inspect", "tiny.gguf").startswith(message)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"types": {"blk.0.attn_q.weight": "Q5_0"}}, "tiny.gguf: tensor 'blk.0.attn_q.weight' is Q5_0, which is not "),
        ({"architecture": "gpt2"}, "tiny.gguf: GGUF architecture 'gpt2' is not supported (supported: 'llama')"),
        ({"metadata": {"llama.attention.sliding_window": 4}}, "tiny.gguf: metadata 'llama.attention.sliding_window' "),
        ({"metadata": {"tokenizer.ggml.model": None}}, "tiny.gguf holds no tokenizer "),
        ({"metadata": {"tokenizer.ggml.pre": "odd"}}, "tiny.gguf: pre-tokenizer 'odd' is not supported (supported: "),
    ],
)
def test_gguf_files_of_something_else(write_gguf, refused, monkeypatch, tmp_path, options, message):
    monkeypatch.chdir(tmp_path)
    write_gguf(**options)
    assert refused("decode", "tiny.gguf", "--prompt", "hello").startswith(message)


def test_a_disk_that_fills_up_leaves_no_report(folder, jaxwafer, monkeypatch):
    write_bytes = Path.write_bytes

    def full(self, data):
        write_bytes(self, data[:10])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    before = sorted(os.listdir())
    status, _, err = jaxwafer(*RUN, "--json", "report.json")
    assert (status, err) == (2, f"jaxwafer: cannot write {Path('report.json').absolute()}: No space left on device\n")
    assert sorted(os.listdir()) == before


def test_names_that_look_like_markup_are_printed_as_they_are(folder, jaxwafer):
    folder.rename("[m]")
    status, out, err = jaxwafer("inspect", "./[m]")
    assert (status, err) == (0, "")
    assert out.startswith("./[m] (llama)")


def test_platforms_that_jax_does_not_have(folder, refused):
    Path("mesh.toml").write_text('[mesh]\nwafers = 1\ncores = 1\nplatform = "none"\n')
    assert refused(*RUN, "--mesh", "mesh.toml").startswith("the mesh asks for 'none', but JAX has no none devices here")


def spawn(*argv: str, **options) -> subprocess.Popen:
    """The command in a process of its own, from this checkout; modules in the working directory come first."""
    paths = [os.getcwd(), str(Path(package.__file__).parents[1])]
    command = [sys.executable, "-m", "jaxwafer.cli.main", *argv]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.Popen(command, text=True, stderr=subprocess.PIPE, env=environment, **options)


def test_ctrl_c_while_text_streams(folder):
    flags = ("--max-new-tokens", "500", "--dtype", "f32", "--json", "report.json")
    with spawn("decode", "m", "--prompt", "t5", *flags, stdout=subprocess.PIPE) as process:
        assert process.stdout.read(1) == "t"
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read() == "jaxwafer: interrupted\n"
    assert os.listdir() == ["m"]


def test_ctrl_c_while_modules_are_imported(folder):
    """It reaches one that, as compiled ones may, makes another error of it."""
    Path("msgspec.py").write_text(
        "import os, signal\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n"
        "except KeyboardInterrupt:\n    raise ImportError('cannot initialise')\n"
    )
    with spawn("devices", stdout=subprocess.DEVNULL) as process:
        assert process.wait() == 130
        assert process.stderr.read() == "jaxwafer: interrupted\n"


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs a device that is full")
def test_output_that_cannot_be_written(folder):
    with open("/dev/full", "w") as full, spawn("inspect", "m", stdout=full) as process:
        assert process.wait() == 2
        assert process.stderr.read() == "jaxwafer: cannot write the output: No space left on device\n"
