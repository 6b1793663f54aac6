"""The trade of wafers, requests and speed: what a stage holds depends on its layers' kinds and the context.

For every number of wafers, of the contiguous pipelines that hold most requests the one whose slowest stage is fastest,
and the fastest of all that hold those asked for. What another outdoes in wafers, requests and the speed of each request
is left out.
"""

from jaxwafer.partition.capacity import capacity
from jaxwafer.partition.chain import fastest, roomiest
from jaxwafer.partition.evaluate import pareto, speed
from jaxwafer.partition.problem import Problem, Proposal


def propose(problem: Problem) -> list[Proposal]:
    first = problem.search(lambda wafers: fastest(problem, wafers, problem.least)).wafers
    found, points = {}, []
    for wafers in [first] if problem.wafers else range(first, max(first, problem.count) + 1):
        for requests, note in ((roomiest(problem, wafers), "most requests"), (problem.least, "fastest")):
            partition = fastest(problem, wafers, requests)
            if partition is None or partition in found:
                continue
            proposal = Proposal(partition=partition, note=f"{note} on {wafers} wafers")
            held = capacity(problem, proposal, crossover=False).requests
            each = speed(problem, proposal, held, problem.micro_batch).each
            found[partition] = proposal
            points.append((-wafers, held, each))
    best = pareto(points)
    return [proposal for n, proposal in enumerate(found.values()) if n in best]
