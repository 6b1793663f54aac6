"""The pipeline as a discrete-event simulation: hops, uneven stages, micro-batches, arrivals, prefill beside decode.

A wafer does one thing at a time, first come, first served. Micro-batches of requests go through the stations of the
route, decode a token each time round, and take in requests that were prefilled, chunk after chunk, through the same
stations. In steady state this agrees with the closed form of `partition.evaluate`, and with equal stations with the
engine's ticks.
"""

import heapq
from collections import deque
from dataclasses import dataclass, field
from functools import cache
from itertools import count

import numpy as np

from jaxwafer.partition.evaluate import Plan
from jaxwafer.partition.schedule import Schedule


@dataclass(frozen=True)
class Arrival:
    """A request: seconds, prompt tokens (0: already there), tokens to decode."""

    time: float
    prompt: int
    tokens: int


@dataclass(frozen=True)
class Busy:
    """A server at work: from, to, which micro-batch (−1: prefill)."""

    server: int
    begin: float
    end: float
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """tokens: decoded. seconds: from start to end. steady: tokens/s between the first and last quarter of the tokens.
    first_token: seconds from each request's arrival. each: tokens/s of each request. busy: what servers did."""

    tokens: int
    seconds: float
    steady: float
    first_token: tuple[float, ...]
    each: tuple[float, ...]
    busy: tuple[Busy, ...]

    def utilisation(self, servers: int) -> np.ndarray:
        """Share of the time that each server was at work, float64 [servers]."""
        spent = np.zeros(servers)
        for work in self.busy:
            spent[work.server] += work.end - work.begin
        return spent / max(self.seconds, 1e-300)


@dataclass(frozen=True, kw_only=True)
class Line:
    """The stations of a route. servers: which server each is on. services(station, tokens, prefill) and
    hops(station, tokens) → seconds, the hop being to the next station, from the last one to the first."""

    servers: tuple[int, ...]
    service: object
    hop: object

    @property
    def count(self) -> int:
        return max(self.servers) + 1


def line_of(plan: Plan) -> Line:
    """The stations of a plan: its visits, or with regions its layers, each with a server of its own."""
    problem, shares = plan.problem, plan.shares
    clock, context = problem.clock, problem.context
    visits = [v for v in plan.partition.visits if v.layers]
    if shares:
        stops = [(n, (n,), n == v.layers[-1]) for v in visits for n in v.layers]
    else:
        stops = [(v.wafer, v.layers, True) for v in visits]
    devices = problem.head_devices(plan.partition.wafers)

    @cache
    def service(station: int, tokens: int, prefill: bool) -> float:
        # A prompt's chunk sees half of the context on average.
        seen = context / 2 if prefill else context
        times = [
            clock.layer(problem.model.layers[n], tokens, seen, shares[n] if shares else 1.0).total
            for n in stops[station][1]
        ]
        last = station == len(stops) - 1
        return sum(times) + (clock.head(1 if prefill else tokens, devices).total if last else 0.0)

    @cache
    def hop(station: int, tokens: int) -> float:
        return clock.hop(stops[station][1][-1], tokens) if plan.changes and stops[station][2] else 0.0

    return Line(servers=tuple(s[0] for s in stops), service=service, hop=hop)


@dataclass
class _Request:
    arrival: Arrival
    left: int = 0
    first: float = 0.0
    done: float = 0.0


@dataclass
class _Job:
    """A micro-batch on its way, or a chunk of a prompt. place: its station."""

    micro_batch: int
    tokens: int
    requests: list[_Request]
    place: int = 0
    last_chunk: bool = False


@dataclass
class _Server:
    queue: deque = field(default_factory=deque)
    job: _Job | None = None


def simulate(
    line: Line, arrivals: list[Arrival], *, micro_batches: int, micro_batch: int, chunk: int = 256
) -> Simulation:
    """Run the requests to their ends over `micro_batches` micro-batches of `micro_batch` rows."""
    servers = [_Server() for _ in range(line.count)]
    members: list[list[_Request]] = [[] for _ in range(micro_batches)]
    moving = [False] * micro_batches
    waiting: deque[_Request] = deque()
    reserved = 0
    requests = [_Request(a, a.tokens) for a in arrivals]
    events: list[tuple[float, int, object, object]] = []
    order, busy, stamps = count(), [], []

    def at(time: float, action, subject) -> None:
        heapq.heappush(events, (time, next(order), action, subject))

    def arrive(now: float, request: _Request) -> None:
        waiting.append(request)
        admit(now)

    def admit(now: float) -> None:
        nonlocal reserved
        while waiting and reserved + sum(map(len, members)) < micro_batches * micro_batch:
            request = waiting.popleft()
            reserved += 1
            if not request.arrival.prompt:
                join(now, request)
                continue
            for start in range(0, request.arrival.prompt, chunk):
                size = min(chunk, request.arrival.prompt - start)
                enter(now, _Job(-1, size, [request], last_chunk=start + size == request.arrival.prompt))

    def join(now: float, request: _Request) -> None:
        nonlocal reserved
        reserved -= 1
        request.first = request.first or now
        number = min(range(micro_batches), key=lambda n: (len(members[n]), n))
        members[number].append(request)
        if not moving[number]:
            moving[number] = True
            enter(now, _Job(number, len(members[number]), list(members[number])))

    def enter(now: float, job: _Job) -> None:
        server = servers[line.servers[job.place]]
        server.queue.append(job)
        serve(now, line.servers[job.place])

    def serve(now: float, number: int) -> None:
        server = servers[number]
        if server.job is None and server.queue:
            server.job = job = server.queue.popleft()
            end = now + line.service(job.place, job.tokens, job.micro_batch < 0)
            busy.append(Busy(number, now, end, job.micro_batch))
            at(end, served, number)

    def served(now: float, number: int) -> None:
        server = servers[number]
        job, server.job = server.job, None
        hop = line.hop(job.place, job.tokens)
        job.place += 1
        if job.place < len(line.servers):
            at(now + hop, enter, job)
        elif job.micro_batch >= 0:
            at(now + hop, decoded, job)
        elif job.last_chunk:
            at(now + hop, join, job.requests[0])
        serve(now, number)

    def decoded(now: float, job: _Job) -> None:
        mine = members[job.micro_batch]
        for request in job.requests:
            request.left -= 1
            stamps.append(now)
            if request.left == 0:
                request.done = now
                mine.remove(request)
        admit(now)
        moving[job.micro_batch] = bool(mine)
        if mine:
            enter(now, _Job(job.micro_batch, len(mine), list(mine)))

    for request in requests:
        at(request.arrival.time, arrive, request)
    now = 0.0
    while events:
        now, _, action, subject = heapq.heappop(events)
        action(now, subject)
    quarter = len(stamps) // 4
    begin, end = (stamps[quarter], stamps[-quarter - 1]) if quarter else (0.0, now)
    inner = sum(begin < stamp <= end for stamp in stamps)
    return Simulation(
        tokens=len(stamps),
        seconds=now,
        steady=inner / (end - begin) if end > begin else 0.0,
        first_token=tuple(r.first - r.arrival.time for r in requests),
        each=tuple(r.arrival.tokens / (r.done - r.first) if r.done > r.first else 0.0 for r in requests),
        busy=tuple(busy),
    )


def simulate_plan(plan: Plan, arrivals: list[Arrival]) -> Simulation:
    """Requests through a plan: as many micro-batches as stations, or as the requests that fit fill."""
    line, size = line_of(plan), plan.problem.micro_batch
    size = min(size, plan.requests)
    return simulate(line, arrivals, micro_batches=min(len(line.servers), plan.requests // size), micro_batch=size)


def poisson(count_: int, prompt: int, tokens: int, rate: float | None, seed: int = 0) -> list[Arrival]:
    """Requests that arrive at random, `rate` a second, or all at once."""
    if rate is None:
        return [Arrival(0.0, prompt, tokens)] * count_
    times = np.cumsum(np.random.default_rng(seed).exponential(1.0 / rate, count_))
    return [Arrival(float(time), prompt, tokens) for time in times]


def tick_trace(schedule: Schedule, tokens: list[int]) -> np.ndarray:
    """Which micro-batch each wafer works on in each tick of the engine's loop, int32 [ticks, wafers], −1 for none.

    tokens: that each micro-batch decodes. Micro-batch b enters in rounds b, b + P, b + 2P, …, where P is the number of
    micro-batches or, if larger, of rounds; the loop ends with the round in which the last token leaves.
    """
    circulation = max(len(tokens), schedule.rounds)
    entries = [(b + k * circulation, b) for b, count_ in enumerate(tokens) for k in range(count_)]
    if not entries:
        return np.full((0, schedule.wafers), -1, np.int32)
    rounds = max(r for r, _ in entries) + schedule.rounds
    trace = np.full((rounds * schedule.period, schedule.wafers), -1, np.int32)
    for entered, b in entries:
        for visit, time in zip(schedule.visits, schedule.times, strict=True):
            trace[entered * schedule.period + time, visit.wafer] = b
    return trace
