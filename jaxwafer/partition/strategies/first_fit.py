"""Fewest wafers in a contiguous pipeline: each wafer takes layers until the next one would not fit."""

from jaxwafer.partition.plan import Partition
from jaxwafer.partition.problem import Problem, Proposal, padded


def propose(problem: Problem) -> list[Proposal]:
    return [Proposal(partition=problem.search(lambda wafers: pack(problem, wafers)))]


def pack(problem: Problem, wafers: int) -> Partition | None:
    """The layers on at most `wafers` wafers, or None."""
    runs, held = [], []
    for layer in range(problem.count):
        if held and not problem.fits([*held, layer], problem.least, wafers):
            runs.append(tuple(held))
            held = []
        held.append(layer)
    runs.append(tuple(held))
    whole = all(problem.fits(run, problem.least, wafers) for run in runs)
    return padded(Partition(tuple(runs)), wafers) if whole and len(runs) <= wafers else None
