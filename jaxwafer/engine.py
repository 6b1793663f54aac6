"""The engine: a model on a mesh, and requests that go through it."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import jax
import numpy as np

from jaxwafer.cache.blocks import BlockAllocator
from jaxwafer.cache.kv import allocate, block_shards
from jaxwafer.checkpoint.load import formats_for, load_weights
from jaxwafer.checkpoint.open import open_checkpoint
from jaxwafer.checkpoint.source import Checkpoint
from jaxwafer.errors import UserError
from jaxwafer.mesh import device_memory, make_mesh, parse_mesh
from jaxwafer.model import spec_from_config
from jaxwafer.options import Options, prepare
from jaxwafer.partition.plan import Partition
from jaxwafer.pipeline.queue import Queue, Request, Sampling, chunk_length, chunks_of
from jaxwafer.text import TextStream, prompt_tokens


@dataclass(frozen=True)
class Event:
    """What a step brought for one request: new tokens, the text they complete, and how it ended, if it did."""

    request: Request
    tokens: list[int]
    text: str
    finish: str | None


@dataclass
class Stats:
    """What the engine did so far. Seconds are of device calls, compilation apart; tallies
    are float [wafers, phases], of experts [wafers, MLP stacks]."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    prefill_chunks: int = 0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    bursts: int = 0
    ticks: int = 0
    busy_ticks: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))
    tokens: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))
    kv_rows: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))
    experts: np.ndarray = field(default_factory=lambda: np.zeros((1, 1)))


def load(model: str, **options) -> "Engine":
    """An engine for a name from `checkpoints/`, a Hugging Face folder or a GGUF file, with the fields of `Options`."""
    return Engine(open_checkpoint(model), Options(**options))


class Engine:
    """A checkpoint on a mesh. `submit` requests and `step`, or `generate`, which does both.

    Programs for the sizes in `options` are compiled before weights are loaded; bad sizes are refused before that.
    progress: called with (bytes loaded, bytes in all) as weights arrive.
    """

    def __init__(self, checkpoint: Checkpoint, options: Options = Options(), *, partition: Partition | None = None,
                 progress: Callable[[int, int], None] = lambda done, total: None):  # fmt: skip
        self.options = options
        self.spec = spec_from_config(checkpoint.config)
        self.mesh = make_mesh(parse_mesh(options.mesh))
        formats = formats_for(checkpoint, options.weights)
        self.tokenizer = checkpoint.tokenizer()
        self.programs = prepare(
            self.spec, formats, self.mesh, options, partition=partition, eos=len(self.tokenizer.eos_ids)
        )
        self.placement, self.cache_shape = self.programs.pipeline.placement, self.programs.cache
        self._check_memory()
        self.programs.decode(filters=False)
        local = len(self.mesh.local_devices) / self.mesh.size
        total, loaded = int(self.placement.allocated_bytes * self.placement.wafers * local), 0

        def arrived(nbytes: int) -> None:
            nonlocal loaded
            loaded += nbytes
            progress(loaded, total)

        self.weights = load_weights(checkpoint, self.placement, self.mesh, self.programs.weight_formats, arrived)
        self._cache = allocate(self.programs.abstract_cache, self.programs.cache_formats)
        blocks = BlockAllocator(self.cache_shape.blocks, options.block, block_shards(self.placement))
        sizes = self.programs.sizes
        self.queue = Queue(sizes, blocks, options.max_context)
        self._eos = np.resize(np.array(self.tokenizer.eos_ids or [-1], np.int32), sizes.eos)
        self._flight, self._round = self.programs.idle_flight(), 0
        self._requests, self._slots, self._changed = None, None, True
        self._streams: dict[Request, TextStream] = {}
        self._submitted = 0
        self.stats = Stats()

    def _check_memory(self) -> None:
        """Refuse what no device can hold: a CPU would not say so, but be killed once it writes to it."""
        cache, held = self.cache_shape, device_memory(self.mesh)
        weights = self.placement.allocated_bytes
        if self.options.stream_weights and self.mesh.local_devices[0].platform != "cpu":
            # A layer at work and the next one; a CPU's device memory is the host's.
            weights = self.placement.global_bytes + 2 * sum(map(self.placement.layer_bytes, self.placement.stacks))
        wafer = weights + cache.blocks * cache.block_bytes
        needed = -(-wafer // self.placement.cores)
        if held is not None and needed > held:
            raise UserError(
                f"weights and KV cache take {needed / 1e9:.1f} GB of each device, which has {held / 1e9:.1f} GB: lower "
                "the context, micro-batch or micro-batches, use a smaller format or a larger mesh"
            )

    def submit(self, prompt: str | Sequence[int], sampling: Sampling = Sampling(), *, chat: bool = False) -> Request:
        """Queue a prompt, text or tokens; `chat` puts text into the model's chat template as a user's message.

        Empty prompts and ones that cannot fit are refused.
        """
        return self._queue(self._request(self._submitted, prompt, sampling, chat))

    def generate(self, prompts: Sequence[str | Sequence[int]], sampling: Sampling | Sequence[Sampling] = Sampling(), *,
                 chat: bool = False) -> Iterator[Event]:  # fmt: skip
        """Run prompts to their ends, yielding events as tokens come. All are checked before any is queued."""
        each = [sampling] * len(prompts) if isinstance(sampling, Sampling) else sampling
        if len(each) != len(prompts):
            raise UserError(f"{len(prompts)} prompts need as many samplings, not {len(each)}")
        pairs = enumerate(zip(prompts, each, strict=True), self._submitted)
        for request in [self._request(number, prompt, params, chat) for number, (prompt, params) in pairs]:
            self._queue(request)
        while self.queue.busy:
            yield from self.step()

    def _request(self, number: int, prompt: str | Sequence[int], sampling: Sampling, chat: bool) -> Request:
        """A prompt as a request that will fit, not queued yet."""
        name = f"prompt {number + 1}"
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UserError(f"{name} is empty")
            text, tokens = prompt, self._token_ids(prompt_tokens(self.tokenizer, prompt, chat), name)
        else:
            tokens = self._token_ids(prompt, name)
            text = self.tokenizer.decode(tokens.tolist())
        request = Request(number, text, tokens, sampling)
        self.queue.check(request)
        return request

    def _queue(self, request: Request) -> Request:
        self.queue.submit(request)
        self._submitted += 1
        self._streams[request] = TextStream(self.tokenizer.stream(), request.sampling.stop)
        return request

    def _token_ids(self, tokens: Sequence[int], name: str) -> np.ndarray:
        """Token ids as int32; none at all, and what is no id of the vocabulary, is a UserError."""
        if len(tokens) == 0:
            raise UserError(f"{name} is empty")
        if not all(isinstance(token, int | np.integer) for token in tokens):
            raise UserError(f"{name} is neither a text nor a list of token ids")
        if min(tokens) < 0 or max(tokens) >= self.spec.vocab:
            raise UserError(f"{name} has token ids outside 0 to {self.spec.vocab - 1}")
        return np.array(tokens, np.int32)

    def step(self, rounds: int | None = None) -> list[Event]:
        """Admit and prefill what fits, then decode one burst, or at most `rounds` rounds of ticks if that is less.

        Returns what came of it, in order.
        """
        events = self._prefill(self.queue.admit())
        if self.queue.running:
            events += self._decode(self.programs.sizes.burst if rounds is None else rounds)
        return events

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Log probability of each token but the first, given those before it; float32 [len(tokens) − 1]."""
        if len(tokens) < 2:
            raise UserError("scoring needs at least two tokens")
        tokens = self._token_ids(tokens, "the text to score")
        request = Request(self._submitted, "", tokens[:-1], Sampling(max_new_tokens=1))
        if len(tokens) - 1 > self.queue.context:
            raise UserError(f"{len(tokens)} tokens do not fit the context of {self.queue.context}: raise --max-context")
        if not self.queue.claim(request):
            raise UserError("running requests hold the KV cache: let them finish before scoring")
        sizes, scores = self.programs.sizes, []
        length = chunk_length(len(tokens), sizes.chunk_tokens)
        program = self.programs.score(length)
        for chunks, work, _ in chunks_of([request], sizes, length):
            targets = np.zeros_like(chunks.tokens)
            for i, (_, start) in enumerate(work):
                piece = tokens[1:][start : start + length]
                targets[i, : len(piece)] = piece
            chunks = self.programs.put(chunks.replace(targets=targets))
            number = self.programs.put(np.int32(len(work)))
            self._cache, result = program(self.weights, self.programs.tables, self._cache, chunks, number)
            scores += [
                row[: len(tokens) - 1 - start] for row, (_, start) in zip(np.asarray(result), work, strict=False)
            ]
        self.queue.finish(request, "length")
        return np.concatenate(scores)

    def _prefill(self, requests: list[Request]) -> list[Event]:
        if not requests:
            return []
        sizes, events = self.programs.sizes, []
        length = chunk_length(max(len(r.prompt) for r in requests), sizes.chunk_tokens)
        program = self.programs.prefill(length, filters=self.queue.filters)
        for chunks, work, ends in chunks_of(requests, sizes, length):
            begin = time.perf_counter()
            chunks, number = self.programs.put((chunks, np.int32(len(work))))
            self._cache, result = program(self.weights, self.programs.tables, self._cache, chunks, number)
            sampled = np.asarray(result)
            now = time.perf_counter()
            self.stats.prefill_seconds += now - begin
            self.stats.prefill_tokens += sum(min(length, len(r.prompt) - start) for r, start in work)
            self.stats.prefill_chunks += len(work)
            for request, token in zip(ends, sampled, strict=False):
                if request is not None:
                    request.first_token = now
                    events.append(self._take(request, [int(token)]))
        self._changed = True
        return events

    def _decode(self, rounds: int) -> list[Event]:
        sizes, programs = self.programs.sizes, self.programs
        program = programs.decode(filters=self.queue.filters)
        fresh = self.queue.take_fresh()
        if self._changed:
            self._requests = programs.put(self.queue.requests())
            self._slots = programs.put(self.queue.slots(self._eos, fresh))
            self._changed = False
        else:
            self._slots = self._slots.replace(fresh=programs.put(fresh))
        first, number = programs.put((np.int32(self._round), np.int32(min(rounds, sizes.burst))))
        begin = time.perf_counter()
        self._cache, self._requests, self._flight, out, done, tally = program(
            self.weights, programs.tables, self._cache, self._requests, self._slots, self._flight, first, number
        )
        out, done, tally = jax.device_get((out, done, tally))
        self.stats.decode_seconds += time.perf_counter() - begin
        self.stats.bursts += 1
        self.stats.ticks += int(done) * self.placement.schedule.period
        self.stats.busy_ticks = self.stats.busy_ticks + tally.ticks
        self.stats.tokens = self.stats.tokens + tally.tokens
        self.stats.kv_rows = self.stats.kv_rows + tally.kv_rows
        self.stats.experts = self.stats.experts + tally.experts
        new: dict[Request, list[int]] = {}
        for number in range(int(done)):
            micro_batch = (self._round + number - self.placement.schedule.exit[2]) % programs.period
            for row in np.flatnonzero(out[number] >= 0):
                new.setdefault(self.queue.running[micro_batch, int(row)], []).append(int(out[number, row]))
        self._round = (self._round + int(done)) % programs.period
        self.stats.decode_tokens += sum(map(len, new.values()))
        return [self._take(request, tokens) for request, tokens in new.items()]

    def _take(self, request: Request, tokens: list[int]) -> Event:
        """Add sampled tokens to a request; end it where an end token, a stop text or its length says so."""
        stream, text, kept, finish = self._streams[request], "", [], None
        for token in tokens:
            if token in self.tokenizer.eos_ids and not request.sampling.ignore_eos:
                finish = "stop"
                break
            kept.append(token)
            request.tokens.append(token)
            text += stream.push(token)
            if stream.stopped:
                finish = "stop"
                break
            if len(request.tokens) == request.sampling.max_new_tokens:
                finish = "length"
                break
        if finish:
            text += stream.flush()
        request.output += text
        if finish:
            self.queue.finish(request, finish)
            del self._streams[request]
            self._changed = True
        return Event(request, kept, text, finish)
