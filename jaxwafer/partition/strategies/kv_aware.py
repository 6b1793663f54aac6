"""The trade of wafers for requests: what a stage holds depends on its layers' kinds and the context.

For every number of wafers, the most requests that a contiguous pipeline holds, and of the pipelines that hold them the
one whose slowest stage is fastest. Where more wafers bring no more requests they are left out.
"""

from jaxwafer.partition.chain import fastest, roomiest
from jaxwafer.partition.problem import Problem, Proposal


def propose(problem: Problem) -> list[Proposal]:
    first = problem.search(lambda wafers: fastest(problem, wafers, problem.least)).wafers
    found, most = [], 0
    for wafers in [first] if problem.wafers else range(first, max(first, problem.count) + 1):
        requests = roomiest(problem, wafers)
        if requests > most:
            most = requests
            partition = fastest(problem, wafers, requests)
            found.append(Proposal(partition=partition, note=f"most requests on {wafers} wafers"))
    return found
