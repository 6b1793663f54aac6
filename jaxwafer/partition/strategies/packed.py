"""Wafers that are passed more than once: fewest wafers, then fewest changes, by an integer programme.

The chain is cut into runs of layers; runs share wafers wherever they are in the chain. Variables are which runs the
chain is cut into (a path through its positions) and how many wafers of each pattern, a multiset of run types, there
are. Cost: wafers + λ · runs, as every run is a change of wafers. Where there are more patterns than can be listed, or
none is proved best in time, runs are packed first-fit in decreasing order of size.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations_with_replacement

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_array

from jaxwafer.errors import UserError
from jaxwafer.partition.chain import fastest, roomiest
from jaxwafer.partition.plan import Partition, Visit, routed
from jaxwafer.partition.problem import Problem, Proposal, padded

# Times that a token passes a wafer, at most.
MAX_VISITS = 3
MAX_PATTERNS = 2000
TIME_LIMIT_S = 10.0
# Levels of requests that are tried where none is asked for.
MAX_LEVELS = 4

# What a run of layers holds, whatever their order: sorted (layer type, count).
RunType = tuple[tuple[int, int], ...]


def propose(problem: Problem) -> list[Proposal]:
    if problem.wafers and not problem.requests:
        return [_most(problem)]
    found: list[Proposal] = []
    for requests in [problem.least] if problem.requests else levels(problem, MAX_LEVELS):
        partition = _packed(problem, requests)
        # What holds more on as many wafers takes the place of what holds less.
        if found and partition.wafers <= found[-1].partition.wafers:
            found.pop()
        found.append(Proposal(partition=partition, note=f"packed for {requests} requests"))
    return found


def _packed(problem: Problem, requests: int) -> Partition:
    asked = replace(problem, requests=requests)
    return asked.search(_Packer(asked))


def _most(problem: Problem) -> Proposal:
    """The packing for most requests on the wafers there are."""
    reason = None
    for requests in reversed(levels(problem, problem.count)):
        try:
            return Proposal(partition=_packed(problem, requests), note=f"packed for {requests} requests")
        except UserError as error:
            reason = error
    raise reason


def levels(problem: Problem, most: int) -> list[int]:
    """Requests worth packing for, at most so many: what contiguous pipelines of different lengths hold."""
    problem.check_layers()
    least = replace(problem, requests=None).lower_bound
    held = {roomiest(problem, wafers) for wafers in range(least, problem.count + 1)}
    every = sorted({1} | {r for r in held if r >= 1})
    if len(every) > most:
        every = [every[i] for i in np.unique(np.linspace(0, len(every) - 1, most).round().astype(int))]
    return every


class _Packer:
    """The best partition into at most so many wafers that holds the requests, or None."""

    def __init__(self, problem: Problem):
        self.problem, self.requests = problem, problem.least
        self.packed: dict[int, Partition | None] = {}

    def __call__(self, wafers: int) -> Partition | None:
        # A contiguous pipeline of as many wafers changes least often.
        contiguous = fastest(self.problem, wafers, self.requests)
        if contiguous is not None or len(set(_layer_types(self.problem))) == 1:
            return contiguous
        room = self.problem.room(wafers)
        if room not in self.packed:
            self.packed[room] = pack(self.problem, wafers, self.requests)
        found = self.packed[room]
        return padded(found, wafers) if found and found.wafers <= wafers else None


def pack(problem: Problem, wafers: int, requests: int) -> Partition | None:
    """The packing for `requests` requests, with the room of a wafer where there are `wafers`; None where none fits."""
    types = _layer_types(problem)
    runs = _runs(problem, types, requests, wafers)
    patterns = _patterns(problem, types, set(runs.values()), requests, wafers)
    chosen = _solve(problem, runs, patterns) if patterns else None
    return _assign(problem, *chosen) if chosen else _first_fit_decreasing(problem, requests, wafers)


def _layer_types(problem: Problem) -> list[int]:
    """Number of each layer's type: layers of a type weigh and keep the same."""
    known: dict[tuple, int] = {}
    return [
        known.setdefault((int(w), int(r)), len(known))
        for w, r in zip(problem.weights, problem.request_bytes, strict=True)
    ]


def _runs(problem: Problem, types: list[int], requests: int, wafers: int) -> dict[tuple[int, int], RunType]:
    """Type of each run [first, last) that a wafer holds."""
    found = {}
    for first in range(problem.count):
        for last in range(first + 1, problem.count + 1):
            if not problem.fits(range(first, last), requests, wafers):
                break
            found[first, last] = tuple(sorted(Counter(types[first:last]).items()))
    return found


def _patterns(problem: Problem, types: list[int], kinds: set[RunType], requests: int,
              wafers: int) -> list[tuple[RunType, ...]]:  # fmt: skip
    """The multisets of run types that a wafer holds and to which none can be added; empty where there are too many."""
    member = {t: types.index(t) for t in set(types)}
    kinds = sorted(kinds)
    if sum(len(kinds) ** n for n in range(1, MAX_VISITS + 1)) > 50 * MAX_PATTERNS:
        return []

    def layers(pattern: tuple[RunType, ...]) -> Iterator[int]:
        return (member[t] for run in pattern for t, n in run for _ in range(n))

    held = [
        p
        for n in range(1, MAX_VISITS + 1)
        for p in combinations_with_replacement(kinds, n)
        if problem.fits(layers(p), requests, wafers)
    ]
    smaller = {tuple(p[:i] + p[i + 1 :]) for p in held for i in range(len(p))}
    maximal = [p for p in held if p not in smaller]
    return maximal if len(maximal) <= MAX_PATTERNS else []


def _solve(problem: Problem, runs: dict, patterns: list) -> tuple[list, Counter] | None:
    """(runs of the chain in order, how many wafers of each pattern) of least cost."""
    arcs, kinds = list(runs), sorted(set(runs.values()))
    column, row = len(arcs), {kind: problem.count + 1 + n for n, kind in enumerate(kinds)}
    matrix = lil_array((problem.count + 1 + len(kinds), len(arcs) + len(patterns)))
    for n, (first, last) in enumerate(arcs):
        matrix[first, n], matrix[last, n] = 1.0, -1.0
        matrix[row[runs[first, last]], n] = -1.0
    for n, pattern in enumerate(patterns):
        for kind, times in Counter(pattern).items():
            matrix[row[kind], column + n] = times
    # A path leaves the first position and enters the last; there is a place for every run.
    low = np.zeros(matrix.shape[0])
    high = np.concatenate([np.zeros(problem.count + 1), np.full(len(kinds), np.inf)])
    low[0] = high[0] = 1.0
    low[problem.count] = high[problem.count] = -1.0
    cost = np.concatenate([np.full(len(arcs), problem.change_cost), np.ones(len(patterns))])
    most = np.concatenate([np.ones(len(arcs)), np.full(len(patterns), problem.count)])
    result = milp(
        cost,
        constraints=LinearConstraint(matrix.tocsr(), low, high),
        integrality=np.ones(len(cost)),
        bounds=Bounds(0, most),
        options={"time_limit": TIME_LIMIT_S},
    )
    if result.x is None:
        return None
    taken = np.round(result.x).astype(int)
    path = sorted(arc for arc, n in zip(arcs, taken, strict=False) if n)
    wafers = Counter({p: int(n) for p, n in zip(patterns, taken[column:], strict=True) if n})
    return [(arc, runs[arc]) for arc in path], wafers


def _assign(problem: Problem, path: list, wafers: Counter) -> Partition:
    """Give each run, in order, a place: on the wafer opened first that has one, else on a new one."""
    free: dict[RunType, list[int]] = defaultdict(list)
    visits, opened = [], 0
    for (first, last), kind in path:
        if not free[kind]:
            pattern = min((p for p, n in wafers.items() if n and kind in p), key=len)
            wafers[pattern] -= 1
            for place in pattern:
                free[place].append(opened)
            opened += 1
        visits.append(Visit(free[kind].pop(0), tuple(range(first, last))))
    return routed(tuple(visits), opened).check(problem.count)


def _first_fit_decreasing(problem: Problem, requests: int, wafers: int) -> Partition | None:
    """Layers, largest first, each on the first wafer that holds it; wafers are numbered as the chain meets them."""
    size = problem.weights + requests * problem.request_bytes
    held: list[list[int]] = []
    # Equal layers go in the order of the chain, so that neighbours meet.
    for layer in sorted(range(problem.count), key=lambda n: (-size[n], n)):
        wafer = next((w for w in held if problem.fits([*w, layer], requests, wafers)), None)
        if wafer is None:
            if not problem.fits([layer], requests, wafers):
                return None
            held.append(wafer := [])
        wafer.append(layer)
    home = {layer: n for n, wafer in enumerate(held) for layer in wafer}
    number: dict[int, int] = {}
    visits: list[Visit] = []
    for layer in range(problem.count):
        wafer = number.setdefault(home[layer], len(number))
        if visits and visits[-1].wafer == wafer:
            visits[-1] = Visit(wafer, (*visits[-1].layers, layer))
        else:
            visits.append(Visit(wafer, (layer,)))
    return routed(tuple(visits), len(held)).check(problem.count)
