"""Requests on the host: which wait, which have a slot, and the tables that the programs read."""

import time
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from jaxwafer.cache.blocks import BlockAllocator
from jaxwafer.errors import UserError
from jaxwafer.ops.sampling.api import SamplingState
from jaxwafer.pipeline.decode import Requests, Slots
from jaxwafer.pipeline.prefill import Chunks
from jaxwafer.pipeline.programs import Sizes


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one request's tokens are chosen and when it ends.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1 is off. min_p: 0 is off. seed: of this request's random stream.
    max_new_tokens: at most. stop: texts that end it (and are cut off). ignore_eos: go on past end-of-sequence tokens.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        # A text is a sequence of texts too, each of one character.
        if not isinstance(self.stop, tuple | list) or not all(isinstance(s, str) for s in self.stop):
            raise UserError(f"stop must be a list of texts, not {self.stop!r}")
        checks = {
            f"temperature must be a number from 0 up, not {self.temperature}": 0 <= self.temperature < float("inf"),
            f"top-k must be 0 (off) or more, not {self.top_k}": 0 <= self.top_k < 2**31,
            f"top-p must be above 0 and at most 1, not {self.top_p}": 0 < self.top_p <= 1,
            f"min-p must be from 0 to 1, not {self.min_p}": 0 <= self.min_p <= 1,
            f"seed must be from 0 to 2^32 - 1, not {self.seed}": 0 <= self.seed < 2**32,
            f"max-new-tokens must be at least 1, not {self.max_new_tokens}": self.max_new_tokens >= 1,
            "a stop text must not be empty": all(self.stop),
        }
        for message, holds in checks.items():
            if not holds:
                raise UserError(message)


@dataclass(eq=False)
class Request:
    """One prompt (its text, and its tokens int32) on its way.

    tokens: sampled so far; output: their text, cut at a stop text. finish: None while it runs, then "stop" (an end
    token or stop text) or "length".
    """

    number: int
    text: str
    prompt: np.ndarray
    sampling: Sampling
    submitted: float = field(default_factory=time.perf_counter)
    tokens: list[int] = field(default_factory=list)
    output: str = ""
    blocks: np.ndarray | None = None
    slot: tuple[int, int] | None = None
    first_token: float | None = None
    finished: float | None = None
    finish: str | None = None

    @property
    def capacity(self) -> int:
        """Tokens whose KV it may have to keep: the last one sampled is never fed back."""
        return len(self.prompt) + self.sampling.max_new_tokens - 1


class Queue:
    """Slots of M micro-batches × B rows and the blocks of the KV cache, given to requests in order of arrival.

    context: most tokens a request may hold, at most what `sizes.blocks` blocks hold.
    """

    def __init__(self, sizes: Sizes, blocks: BlockAllocator, context: int):
        self.sizes, self.blocks = sizes, blocks
        self.context = min(context, blocks.count * blocks.block)
        shape = (sizes.micro_batches, sizes.batch)
        # Rows are filled across micro-batches first, so that few requests still fill many stages.
        self._free = deque((m, b) for b in range(sizes.batch) for m in range(sizes.micro_batches))
        self.waiting: deque[Request] = deque()
        self.running: dict[tuple[int, int], Request] = {}
        self._table = np.zeros((*shape, sizes.blocks), np.int32)
        self._sampling = blank_sampling(shape)
        self._fresh = np.ones(shape, bool)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def check(self, request: Request) -> None:
        """A request that could never fit is a UserError."""
        if request.capacity > self.context:
            raise UserError(
                f"prompt {request.number + 1} has {len(request.prompt)} tokens and may generate "
                f"{request.sampling.max_new_tokens}, but the context holds {self.context}: shorten it, lower "
                "--max-new-tokens or raise --max-context"
            )

    def submit(self, request: Request) -> None:
        """Queue a request; one that could never fit is refused."""
        self.check(request)
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Give slots and blocks to waiting requests, first come first served, as long as both last."""
        admitted = []
        while self.waiting and self.claim(self.waiting[0]):
            admitted.append(self.waiting.popleft())
        return admitted

    def claim(self, request: Request) -> bool:
        """Give a request a slot and blocks, if there are enough."""
        blocks = self.blocks.allocate(request.capacity) if self._free else None
        if blocks is None:
            return False
        request.blocks, request.slot = blocks, self._free.popleft()
        self.running[request.slot] = request
        self._table[request.slot] = 0
        self._table[request.slot][: len(blocks)] = blocks
        set_sampling(self._sampling, request.slot, request.sampling)
        self._fresh[request.slot] = True
        return True

    def finish(self, request: Request, reason: str) -> None:
        """End a request and free its slot and blocks."""
        request.finish, request.finished = reason, time.perf_counter()
        self.blocks.release(request.blocks)
        self._fresh[request.slot] = True
        del self.running[request.slot]
        self._free.append(request.slot)

    def requests(self) -> Requests:
        """The running requests as the decode loop wants them."""
        shape = (self.sizes.micro_batches, self.sizes.batch)
        token, position, remaining = (np.zeros(shape, np.int32) for _ in range(3))
        ends = np.ones(shape, bool)
        for slot, request in self.running.items():
            token[slot] = request.tokens[-1]
            position[slot] = len(request.prompt) + len(request.tokens) - 1
            remaining[slot] = request.sampling.max_new_tokens - len(request.tokens)
            ends[slot] = not request.sampling.ignore_eos
        return Requests(token=token, position=position, remaining=remaining, ends=ends)

    def slots(self, eos: np.ndarray, fresh: np.ndarray) -> Slots:
        """Copies of the host's tables."""
        sampling = SamplingState(**{name: array.copy() for name, array in vars(self._sampling).items()})
        return Slots(table=self._table.copy(), sampling=sampling, eos=eos, fresh=fresh)

    def take_fresh(self) -> np.ndarray:
        """Which rows changed hands since the last call, bool [M, B]."""
        fresh = self._fresh.copy()
        self._fresh[:] = False
        return fresh

    @property
    def filters(self) -> bool:
        """Whether any running request samples."""
        return any(r.sampling.temperature > 0 for r in self.running.values())


def chunks_of(requests: list[Request], sizes: Sizes, length: int):
    """Calls that cover the prompts: (`Chunks`, [(request, first token)], the request each chunk ends or None)."""
    work = [(r, start) for r in requests for start in range(0, len(r.prompt), length)]
    for first in range(0, len(work), sizes.chunks):
        part = work[first : first + sizes.chunks]
        tokens = np.zeros((sizes.chunks, length), np.int32)
        start, count, slot = (np.zeros(sizes.chunks, np.int32) for _ in range(3))
        table = np.zeros((sizes.chunks, sizes.blocks), np.int32)
        sampling = blank_sampling((sizes.chunks,))
        ends: list[Request | None] = [None] * len(part)
        for i, (request, begin) in enumerate(part):
            piece = request.prompt[begin : begin + length]
            tokens[i, : len(piece)], start[i], count[i] = piece, begin, len(piece)
            table[i, : len(request.blocks)] = request.blocks
            slot[i] = request.slot[0] * sizes.batch + request.slot[1]
            set_sampling(sampling, i, request.sampling)
            if begin + length >= len(request.prompt):
                ends[i] = request
        yield (
            Chunks(tokens=tokens, targets=None, start=start, count=count, table=table, slot=slot, sampling=sampling),
            part,
            ends,
        )


def chunk_length(longest: int, lengths: tuple[int, ...]) -> int:
    """The shortest chunk that holds a prompt of `longest` tokens, or the longest there is."""
    return next((n for n in lengths if n >= longest), lengths[-1])


def blank_sampling(shape: tuple[int, ...]) -> SamplingState:
    """Greedy rows, as NumPy arrays."""
    return SamplingState(
        temperature=np.zeros(shape, np.float32),
        top_k=np.zeros(shape, np.int32),
        top_p=np.ones(shape, np.float32),
        min_p=np.zeros(shape, np.float32),
        seed=np.zeros(shape, np.uint32),
    )


def set_sampling(state: SamplingState, row, sampling: Sampling) -> None:
    for name, array in vars(state).items():
        array[row] = getattr(sampling, name)
