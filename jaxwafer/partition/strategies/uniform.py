"""Equal layer counts: the control."""

from jaxwafer.partition.plan import Partition, uniform
from jaxwafer.partition.problem import Problem, Proposal


def propose(problem: Problem) -> list[Proposal]:
    def pack(wafers: int) -> Partition | None:
        partition = uniform(problem.count, wafers)
        held = all(problem.fits(layers, problem.least, wafers) for layers in partition.layers)
        return partition if held else None

    return [Proposal(partition=problem.search(pack))]
