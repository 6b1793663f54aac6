"""The layers as a chain that is cut into runs, and the dynamic programme over its cuts.

All matrices are [L + 1, L + 1]: element (i, j) is of the run of layers i … j − 1, infinite or −1 where i ≥ j.
"""

import numpy as np

from jaxwafer.partition.plan import Partition
from jaxwafer.partition.problem import Problem


def run_sums(values: np.ndarray) -> np.ndarray:
    """Sums of `values` over each run."""
    ends = np.concatenate([[0], np.cumsum(values)])
    return ends[None, :] - ends[:, None]


def capacities(problem: Problem, wafers: int) -> np.ndarray:
    """Requests that a wafer with each run holds, float64; −1 where not even the layers fit, or a run is empty."""
    left = problem.room(wafers) - run_sums(problem.weights).astype(np.float64)
    left = np.where(run_sums(problem.external) > problem.external_room, -1.0, left)
    each = run_sums(problem.request_bytes).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        fits = np.where(each > 0, np.floor(left / each), np.inf)
    size = np.arange(problem.count + 1)
    runs = size[None, :] - size[:, None]
    bad = (left < 0) | (runs < 1) | (runs > (problem.most_layers or problem.count))
    return np.where(bad, -1.0, fits)


def cut(cost: np.ndarray, wafers: int) -> tuple[float, Partition | None]:
    """The cut of the chain into `wafers` runs whose largest cost is least, as PipeDream and Alpa find it.

    best[w][j] = min over i of max(best[w − 1][i], cost[i, j]). Further wafers than layers stay empty. (∞, None) where
    every cut has an infinite cost.
    """
    count = len(cost) - 1
    stages = min(wafers, count)
    best = np.full(count + 1, np.inf)
    best[0] = -np.inf
    chosen = []
    for _ in range(stages):
        worst = np.maximum(best[:, None], cost)
        chosen.append(np.argmin(worst, axis=0))
        best = np.min(worst, axis=0)
    if best[count] == np.inf:
        return np.inf, None
    runs, end = [], count
    for first in reversed(chosen):
        start = int(first[end])
        runs.append(tuple(range(start, end)))
        end = start
    return float(best[count]), Partition((*reversed(runs), *((),) * (wafers - stages)))


def fastest(problem: Problem, wafers: int, requests: int) -> Partition | None:
    """The partition into `wafers` runs that hold so many requests whose slowest is fastest."""
    seconds = run_sums(problem.seconds)
    return cut(np.where(capacities(problem, wafers) >= requests, seconds, np.inf), wafers)[1]


def roomiest(problem: Problem, wafers: int) -> int:
    """The most requests that some partition into `wafers` runs holds; −1 where the layers do not fit."""
    fits = capacities(problem, wafers)
    # Runs that keep nothing hold any number; a finite one stands for it.
    worst, _ = cut(np.where(fits < 0, np.inf, -np.minimum(fits, 1e15)), wafers)
    return int(-worst) if np.isfinite(worst) else -1
