"""The contiguous pipeline whose slowest stage is fastest (PipeDream, Alpa), on the given or the fewest wafers."""

from jaxwafer.partition.chain import fastest
from jaxwafer.partition.problem import Problem, Proposal


def propose(problem: Problem) -> list[Proposal]:
    return [Proposal(partition=problem.search(lambda wafers: fastest(problem, wafers, problem.least)))]
