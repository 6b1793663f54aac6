"""What a proposed partition gives: memory of each wafer, requests, speed, and what binds."""

from dataclasses import dataclass, replace

from jaxwafer.errors import UserError
from jaxwafer.partition.capacity import Capacity, capacity
from jaxwafer.partition.latency import Seconds
from jaxwafer.partition.plan import Partition
from jaxwafer.partition.problem import Problem, Proposal
from jaxwafer.partition.stored import Stored, stored


@dataclass(frozen=True, kw_only=True)
class Wafer:
    """A wafer's memory in bytes, with the requests of the plan, and its time for a micro-batch.

    weights: layers, or the two through which layers stream, whose weights lie in `external`. vocabulary: embedding and
    head. service: seconds. kinds: of its layers, such as "2 KDA + MoE".
    """

    layers: tuple[int, ...]
    kinds: str
    weights: int
    external: int
    vocabulary: int
    kv: int
    state: int
    free: int
    service: Seconds


@dataclass(frozen=True, kw_only=True)
class Speed:
    """At a micro-batch, tokens/s. bandwidth_roof, compute_roof: of a request by the figures alone. estimate: of a
    request alone in the pipeline. each, total: of each and of all of `in_flight` requests, which fill it as far as
    memory lets them. token: seconds, of them hops. slowest: seconds of the slowest stage. binds: by name."""

    micro_batch: int
    bandwidth_roof: float
    compute_roof: float
    estimate: float
    each: float
    total: float
    in_flight: int
    token: Seconds
    hops: float
    slowest: float
    binds: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A partition, evaluated. cores: devices of a wafer. changes: of wafers a token, back to the first included.
    stored: what the engine allocates; None where it cannot run the plan, and refusal says why, or was not asked."""

    strategy: str
    note: str
    problem: Problem
    partition: Partition
    shares: tuple[float, ...] | None
    cores: int
    capacity: Capacity
    wafers: tuple[Wafer, ...]
    changes: int
    speed: Speed
    stored: Stored | None
    refusal: str = ""

    @property
    def devices(self) -> int:
        return self.partition.wafers * self.cores

    @property
    def requests(self) -> int:
        return self.capacity.requests

    @property
    def stations(self) -> int:
        """What works at once: wafers, or with regions layers."""
        return len(self.shares) if self.shares else self.partition.wafers

    @property
    def tokens_per_s_per_mw(self) -> float | None:
        power = self.problem.device.hardware.power_w
        return self.speed.total / (self.devices * power) * 1e6 if power else None

    @property
    def usd_per_million_tokens(self) -> float | None:
        price = self.problem.device.hardware.usd_per_hour
        return self.devices * price / 3600.0 / self.speed.total * 1e6 if price else None

    @property
    def prefill_s(self) -> float:
        return prefill(self, self.problem.context)


def evaluate(problem: Problem, proposal: Proposal, strategy: str, *, engine: bool = True) -> Plan:
    """engine: also place the model as the engine would, where it is a real one."""
    problem = replace(problem, cores=proposal.cores or problem.cores)
    partition = proposal.partition.check(problem.count)
    held = capacity(problem, proposal)
    visits = [v for v in partition.visits if v.layers]
    own, refusal = _stored(problem, partition) if engine and problem.model.spec else (None, "")
    return Plan(
        strategy=strategy,
        note=proposal.note,
        problem=problem,
        partition=partition,
        shares=proposal.shares,
        cores=problem.cores,
        capacity=held,
        wafers=tuple(_wafers(problem, proposal, held)),
        changes=len(visits) if len({v.wafer for v in visits}) > 1 else 0,
        speed=speed(problem, proposal, held.requests, problem.micro_batch),
        stored=own,
        refusal=refusal,
    )


def _stored(problem: Problem, partition: Partition) -> tuple[Stored | None, str]:
    """What the engine allocates, or why it cannot."""
    try:
        own = stored(
            problem.model, partition, cores=problem.cores, memory=problem.memory, context=problem.context,
            streamed=problem.streamed,
        )  # fmt: skip
    except UserError as error:
        return None, str(error)
    return own, ""


def speed(problem: Problem, proposal: Proposal, requests: int, micro_batch: int) -> Speed:
    """Equations 7 to 10 of the cost model: a token's time is its layers', changes of wafers, and the head; all requests
    together are bounded by what is in flight over that time, and by the slowest stage."""
    clock, context, partition = problem.clock, problem.context, proposal.partition
    times = _times(problem, proposal.shares, micro_batch, context)
    visits = [v for v in partition.visits if v.layers]
    wafers = len({v.wafer for v in visits})
    head = clock.head(micro_batch, problem.head_devices(partition.wafers))
    hops = sum(clock.hop(v.layers[-1], micro_batch) for v in visits) if wafers > 1 else 0.0
    token = sum(times, head)
    total = token.total + hops
    if proposal.shares:
        stages, service = len(times), [t.total for t in times]
        service[-1] += head.total
    else:
        stages, service = len(visits), [sum(times[n].total for n in layers) for layers in partition.layers]
        service[visits[-1].wafer] += head.total
    slowest = max(service)
    in_flight = max(1, min(requests, micro_batch * stages))
    rate = problem.accepted * min(in_flight / total, min(micro_batch, in_flight) / slowest)
    parts = token.parts | {"hops": hops}
    return Speed(
        micro_batch=micro_batch,
        bandwidth_roof=problem.accepted / token.bandwidth,
        compute_roof=problem.accepted / token.compute,
        estimate=problem.accepted / total,
        each=rate / in_flight,
        total=rate,
        in_flight=in_flight,
        token=replace(token, total=total),
        hops=hops,
        slowest=slowest,
        binds=max(parts, key=parts.get),
    )


def _wafers(problem: Problem, proposal: Proposal, held: Capacity) -> list[Wafer]:
    partition, context, room = proposal.partition, problem.context, problem.memory
    times = _times(problem, proposal.shares, problem.micro_batch, context)
    rows = []
    for layers in partition.layers:
        chosen = [problem.model.layers[n] for n in layers]
        names = dict.fromkeys(layer.kind for layer in chosen)
        rows.append({
            "layers": layers,
            "kinds": ", ".join(f"{sum(c.kind == n for c in chosen)} {n}" for n in names),
            "weights": problem.window if problem.streamed else sum(layer.weights for layer in chosen),
            "external": int(problem.external[list(layers)].sum()),
            "kv": held.requests * sum(layer.token * layer.seen(context) for layer in chosen),
            "state": held.requests * sum(layer.state for layer in chosen),
            "service": sum((times[n] for n in layers), Seconds()),
        })  # fmt: skip
    free = [room - r["weights"] - r["kv"] - r["state"] for r in rows]
    visits = [v.wafer for v in partition.visits if v.layers]
    shares = _vocabulary(problem, free, (visits[0], visits[-1]))
    return [Wafer(**r, vocabulary=v, free=f - v) for r, v, f in zip(rows, shares, free, strict=True)]


def _vocabulary(problem: Problem, free: list[int], ends: tuple[int, int]) -> list[int]:
    """Bytes of the vocabulary on each wafer; ends: the wafers of the first and the last layer."""
    total, wafers = problem.model.vocabulary, len(free)
    if problem.vocabulary == "mesh":
        return [-(-total // wafers)] * wafers
    if problem.vocabulary == "ends":
        at_ends = [0] * wafers
        at_ends[ends[0]] += problem.model.embedding
        at_ends[ends[1]] += problem.model.head
        return at_ends
    # Wafers with most room first.
    given, left = [0] * wafers, total
    for wafer in sorted(range(wafers), key=lambda w: -free[w]):
        given[wafer] = min(left, max(free[wafer], 0))
        left -= given[wafer]
    return given


def sweep(plan: Plan, batches: range = range(1, 101)) -> tuple[tuple[Speed, bool], ...]:
    """The speed at each micro-batch, and whether none is as good in both the speed of each request and in all."""
    proposal = Proposal(partition=plan.partition, shares=plan.shares)
    rows = [speed(plan.problem, proposal, plan.requests, m) for m in batches]
    best = pareto([(r.each, r.total) for r in rows])
    return tuple((row, n in best) for n, row in enumerate(rows))


def pareto(points: list[tuple[float, ...]]) -> set[int]:
    """Which points are not outdone: none is at least as large everywhere and larger somewhere."""
    return {
        n
        for n, p in enumerate(points)
        if not any(all(b >= a for a, b in zip(p, q, strict=True)) and q != p for q in points)
    }


def prefill(plan: Plan, tokens: int, chunk: int = 256) -> float:
    """Seconds until a prompt of `tokens` tokens has gone through an otherwise idle pipeline, chunk after chunk.

    A chunk sees half the prompt on average.
    """
    problem = plan.problem
    size = min(chunk, tokens)
    each = [t.total for t in _times(problem, plan.shares, size, tokens / 2)]
    visits = [v for v in plan.partition.visits if v.layers]
    stages = each if plan.shares else [sum(each[n] for n in layers) for layers in plan.partition.layers]
    hops = sum(problem.clock.hop(v.layers[-1], size) for v in visits) if plan.changes else 0.0
    head = problem.clock.head(1, problem.head_devices(plan.partition.wafers)).total
    return sum(each) + hops + head + (-(-tokens // size) - 1) * max(stages)


def _times(problem: Problem, shares: tuple[float, ...] | None, requests: int, context: float) -> list[Seconds]:
    """A step's time of each layer, on its region where it has one."""
    keys = list(zip(problem.model.layers, shares or (1.0,) * problem.count, strict=True))
    known = {key: problem.clock.layer(key[0], requests, context, key[1]) for key in set(keys)}
    return [known[key] for key in keys]
