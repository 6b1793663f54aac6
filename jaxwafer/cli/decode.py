"""`jaxwafer decode`: prompts in, text and a roofline report out."""

import contextlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import msgspec
import tyro

from jaxwafer import distributed
from jaxwafer.checkpoint.open import open_checkpoint
from jaxwafer.cli.held_out import examples, grade, grade_table, graded_line
from jaxwafer.cli.run import (
    NOTES,
    ModelFlags,
    OptionalInt,
    OptionalPath,
    OptionalText,
    check_writable,
    load,
    make_folder,
    print_table,
    read_input,
    write_json,
)
from jaxwafer.distributed import Cluster
from jaxwafer.engine import Engine
from jaxwafer.errors import UserError, reason
from jaxwafer.mesh import parse_mesh
from jaxwafer.model import spec_from_config
from jaxwafer.options import Options
from jaxwafer.partition.file import read_partition
from jaxwafer.pipeline.queue import Request, Sampling
from jaxwafer.roofline.report import Run
from jaxwafer.roofline.table import roofline_table
from jaxwafer.text import prompt_tokens
from jaxwafer.train.tasks import Example

# The checkpoint in the repository, and what of it runs without a word.
BUNDLED, BUNDLED_MESH, BUNDLED_PROMPTS = "tiny-kimi-linear", "4x2", 4


@dataclass(kw_only=True)
class Decode(ModelFlags):
    """Decode prompts and print their text and the roofline table; alone, the bundled hybrid on 4x2 devices."""

    model: tyro.conf.Positional[str] = BUNDLED
    """a name from checkpoints/, a Hugging Face folder, or a GGUF file"""
    mesh: OptionalText = None
    """wafers x cores, such as 4x2, or a TOML file or name from meshes/ (default: 1x1, of the bundled model 4x2)"""
    prompt: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """a prompt; may be given several times"""
    prompts_file: OptionalPath = None
    """JSON lines: strings, or objects with "prompt" and any sampling field, such as {"prompt": "Hi", "seed": 3}"""
    held_out: OptionalInt = None
    """this many held-out prompts of each task of the bundled model, and how many answers are right (default: 4 where
    it has no prompt)"""
    raw: bool = False
    """do not apply the chat template of an instruct model"""
    micro_batch: int = 1
    """requests that travel together"""
    micro_batches: OptionalInt = None
    """micro-batches in flight (default: one a wafer, or as many as the prompts fill)"""
    max_new_tokens: int = 128
    """most tokens to generate for each prompt"""
    temperature: float = 0.0
    """0 is greedy"""
    top_k: int = 0
    """keep the k most likely tokens; 0 is off"""
    top_p: float = 1.0
    """keep the most likely tokens that make up this mass; 1 is off"""
    min_p: float = 0.0
    """keep tokens at least this likely, relative to the likeliest; 0 is off"""
    seed: int = 0
    """of the first prompt; each further one adds 1"""
    stop: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """end a text where this would appear; may be given several times"""
    ignore_eos: bool = False
    """go on past end-of-sequence tokens"""
    partition: OptionalPath = None
    """run the plan that `jaxwafer plan --json` wrote to this file; it says the mesh, where --mesh does not"""
    json: OptionalPath = None
    """write the report to this file"""
    stream_weights: bool = False
    """keep the layers' weights in host memory and bring them to the devices layer by layer"""
    trace: OptionalPath = None
    """write a profiler trace into this folder"""
    distributed: bool = False
    """run as one of several processes, as Slurm, Open MPI, Kubernetes or Cloud TPU say, or the next three flags"""
    coordinator: OptionalText = None
    """HOST:PORT at which process 0 can be reached"""
    processes: OptionalInt = None
    """how many processes there are"""
    process: OptionalInt = None
    """which of them this is, from 0"""
    timeout: int = 300
    """seconds to wait for the other processes"""

    def run(self) -> None:
        asked = self._held_out()
        prompts = self._prompts(asked)
        options = self.options(
            micro_batch=self.micro_batch, micro_batches=self.micro_batches, stream_weights=self.stream_weights
        )
        cluster = Cluster(
            coordinator=self.coordinator, processes=self.processes, process=self.process, timeout=self.timeout
        )
        if not self.distributed:
            if self.coordinator is not None:
                raise UserError("--coordinator, --processes and --process are for --distributed: give it too")
            self._decode(prompts, asked, options)
            return
        distributed.join(cluster)
        with distributed.only_leader_prints(), distributed.partners():
            self._decode(prompts, asked, options)
            distributed.leave()

    def _decode(self, prompts: list[tuple[str, Sampling]], asked: list[Example], options: Options) -> None:
        partition = None
        if self.partition:
            partition, cores = read_partition(self.partition)
            if self.mesh is None:
                options = replace(options, mesh=f"{partition.wafers}x{cores}")
        elif self.mesh is None and self.model == BUNDLED:
            options = replace(options, mesh=BUNDLED_MESH)
        shape = parse_mesh(options.mesh)
        json = self.json if distributed.leads() else None
        check_writable(json)
        if self.trace:
            make_folder("--trace", self.trace)
        checkpoint = open_checkpoint(self.model)
        positions = spec_from_config(checkpoint.config).max_context
        longest = self._longest(prompts, checkpoint.tokenizer(), positions)
        if self.max_context is None:
            options = replace(options, max_context=context_for(longest, positions))
        if self.micro_batches is None:
            options = replace(options, micro_batches=min(shape.wafers, -(-len(prompts) // self.micro_batch)))
        engine = load(checkpoint, options, partition)
        trace = jax.profiler.trace(str(self.trace)) if self.trace else contextlib.nullcontext()
        with Run(engine, self.model) as measured, trace:
            requests = [engine.submit(text, sampling, chat=not self.raw) for text, sampling in prompts]
            _stream(engine, requests, asked)
        report = measured.report(requests)
        if asked:
            report["held_out"] = grade(requests[-len(asked) :], asked)
        if json:
            write_json(json, report)
        print_table(roofline_table(report))
        if asked:
            print_table(grade_table(report["held_out"]))

    def _held_out(self) -> list[Example]:
        """Held-out examples: as many as were asked for, or a few of the bundled model where nothing else is asked."""
        if self.held_out is not None:
            return examples(self.held_out)
        alone = self.model == BUNDLED and not self.prompt and not self.prompts_file
        return examples(BUNDLED_PROMPTS) if alone else []

    def _longest(self, prompts: list[tuple[str, Sampling]], tokenizer, positions: int) -> int:
        """Tokens of the longest prompt and its output. What cannot run is refused here, before weights are loaded."""
        name = "the model's context" if self.max_context is None else "--max-context"
        limit = positions if self.max_context is None else self.max_context
        longest = 0
        for number, (text, sampling) in enumerate(prompts, 1):
            tokens = prompt_tokens(tokenizer, text, not self.raw)
            if not text.strip() or not tokens:
                raise UserError(f"prompt {number} is empty")
            # The last token that is sampled is never fed back.
            if len(tokens) + sampling.max_new_tokens - 1 > limit:
                raise UserError(
                    f"prompt {number} has {len(tokens)} tokens and may generate {sampling.max_new_tokens}, but {name} "
                    f"is {limit}: shorten the prompt or lower --max-new-tokens"
                )
            longest = max(longest, len(tokens) + sampling.max_new_tokens)
        return longest

    def _prompts(self, asked: list[Example]) -> list[tuple[str, Sampling]]:
        """Prompts of the command line, the file and the held-out examples, with their sampling."""
        fields = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "stop", "ignore_eos")
        base = {name: getattr(self, name) for name in fields}
        given: list[tuple[str, dict]] = [(text, {}) for text in self.prompt]
        if self.prompts_file:
            given += read_prompts(self.prompts_file)
        # Room for the answer and the end token.
        given += [(e.prompt, {"max_new_tokens": len(e.answer.split()) + 1}) for e in asked]
        if not given:
            raise UserError("no prompt: give --prompt TEXT or --prompts-file FILE")
        return [
            (text, Sampling(**{**base, "seed": self.seed + number, **own})) for number, (text, own) in enumerate(given)
        ]


class PromptLine(msgspec.Struct, forbid_unknown_fields=True):
    """An object of a prompts file."""

    prompt: str
    temperature: float | msgspec.UnsetType = msgspec.UNSET
    top_k: int | msgspec.UnsetType = msgspec.UNSET
    top_p: float | msgspec.UnsetType = msgspec.UNSET
    min_p: float | msgspec.UnsetType = msgspec.UNSET
    seed: int | msgspec.UnsetType = msgspec.UNSET
    max_new_tokens: int | msgspec.UnsetType = msgspec.UNSET
    stop: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET
    ignore_eos: bool | msgspec.UnsetType = msgspec.UNSET


def read_prompts(path: Path) -> list[tuple[str, dict]]:
    """(prompt, its own sampling fields) for each line of a JSON-lines file."""
    prompts = []
    for number, line in enumerate(read_input("--prompts-file", path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = msgspec.json.decode(line, type=str | PromptLine)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise UserError(f"{path}, line {number}: {reason(error)}") from None
        own = {} if isinstance(item, str) else msgspec.to_builtins(item)
        prompts.append((item, {}) if isinstance(item, str) else (own.pop("prompt"), own))
    return prompts


def context_for(tokens: int, positions: int) -> int:
    """A context that holds `tokens`: a power of two, so that prompts of other lengths use the same programs."""
    return min(max(256, 1 << (tokens - 1).bit_length()), positions)


def _stream(engine: Engine, requests: list[Request], asked: list[Example]) -> None:
    """Print one request's text as it comes, and the others' as they end, each under its prompt; held-out examples, the
    last of the requests, in one line."""
    texts = {request: "" for request in requests}
    graded = dict(zip(requests[len(requests) - len(asked) :], asked, strict=True))
    alone = len(requests) == 1 and not asked
    while engine.queue.busy:
        for event in engine.step():
            texts[event.request] += event.text
            if alone:
                print(event.text, end="\n" if event.finish else "", flush=True)
            elif event.finish:
                number = event.request.number + 1
                if event.request in graded:
                    print(f"[{number}] {graded_line(event.request, graded[event.request])}", flush=True)
                else:
                    print(f"[{number}] {event.request.text}\n{texts[event.request]}\n", flush=True)
            elif sys.stderr.isatty():
                total = sum(len(r.tokens) for r in requests)
                NOTES.print(f"{total} tokens", end="\r")
