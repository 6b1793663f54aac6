"""The bundled checkpoint in transformers, which reads a copy of it without its packing."""

import json

import pytest
import safetensors.numpy
from bundled import NAME, tensors

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from jaxwafer.checkpoint.open import open_checkpoint  # noqa: E402
from jaxwafer.engine import Engine, Options  # noqa: E402
from jaxwafer.pipeline.queue import Sampling  # noqa: E402
from jaxwafer.train import tasks  # noqa: E402

NEW = 16


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    checkpoint = open_checkpoint(NAME)
    (folder / "config.json").write_text(json.dumps(checkpoint.config | {"dtype": "float32"}))
    safetensors.numpy.save_file(tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not loaded["missing_keys"] and not loaded["unexpected_keys"] and not loaded["mismatched_keys"]
    return model.eval()


def test_transformers_gives_the_same_greedy_tokens(reference):
    asked = [tasks.held_out(task, 2)[n] for task in tasks.TASKS for n in range(2)]
    machine = Engine(
        open_checkpoint(NAME),
        Options(dtype="f32", kv_cache="f32", max_context=352, prefill_chunk=64, micro_batch=20),
    )
    requests = [machine.submit(e.prompt, Sampling(max_new_tokens=NEW)) for e in asked]
    while machine.queue.busy:
        machine.step()
    for request, example in zip(requests, asked, strict=True):
        ids = torch.tensor([machine.tokenizer.encode(example.prompt)])
        with torch.no_grad():
            out = reference.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False,
                                     eos_token_id=tasks.EOS, pad_token_id=tasks.PAD)  # fmt: skip
        found = out[0, ids.shape[1] :].tolist()
        assert request.tokens == (found[: found.index(tasks.EOS)] if tasks.EOS in found else found)


def test_transformers_reads_the_tokenizer():
    folder = open_checkpoint(NAME).path
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = open_checkpoint(NAME).tokenizer()
    for task in tasks.TASKS:
        prompt = tasks.held_out(task, 1)[0].prompt
        assert theirs(prompt)["input_ids"] == ours.encode(prompt)
    assert theirs.eos_token_id == tasks.EOS and ours.eos_ids == (tasks.EOS,)
