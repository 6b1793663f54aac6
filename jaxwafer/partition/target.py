"""The fewest devices that decode as fast as is asked for, or the nearest miss and what would have to change."""

from dataclasses import replace

from jaxwafer.errors import UserError
from jaxwafer.partition.evaluate import Plan, evaluate
from jaxwafer.partition.problem import Problem, Proposal
from jaxwafer.partition.strategies import minmax, regions
from jaxwafer.partition.strategies.width import widths


def reached(plan: Plan) -> float:
    """tokens/s that a target is held against: each request's where a number of them is asked for, else one's alone."""
    return plan.speed.each if plan.problem.requests else plan.speed.estimate


def fewest(problem: Problem, target: float) -> Plan:
    """The plan of fewest devices whose requests get `target` tokens/s, over widths, numbers of wafers and regions."""
    best, nearest, refused = None, None, None
    for cores in widths(problem.device.hardware.domain):
        wide = replace(problem, cores=cores, wafers=None)
        try:
            first = minmax.propose(wide)[0].partition.wafers
        except UserError as error:
            refused = error
            continue
        for wafers in range(first, max(first, wide.count) + 1):
            if best is not None and wafers * cores >= best.devices:
                break
            for plan in _plans(replace(wide, wafers=wafers)):
                if nearest is None or reached(plan) > reached(nearest):
                    nearest = plan
                if reached(plan) >= target and (best is None or plan.devices < best.devices):
                    best = plan
            # More wafers make a request faster only where its layers have regions that grow with them.
            if problem.device.hardware.fabric is None and not problem.requests:
                break
    if best is not None:
        proposal = Proposal(partition=best.partition, shares=best.shares, note=best.note)
        return evaluate(best.problem, proposal, best.strategy)
    if nearest is None:
        raise refused or UserError(f"{problem.model.name} fits no width of {problem.device.hardware.name}")
    raise UserError(_miss(nearest, target))


def _plans(problem: Problem) -> list[Plan]:
    strategies = [("minmax", minmax.propose)]
    if problem.device.hardware.fabric is not None:
        strategies.append(("regions", regions.propose))
    found = []
    for name, propose in strategies:
        proposals: list[Proposal] = propose(problem)
        found += [evaluate(problem, p, name, engine=False) for p in proposals]
    return [plan for plan in found if plan.requests >= problem.least]


def _miss(plan: Plan, target: float) -> str:
    speed, problem = plan.speed, plan.problem
    overhead = problem.device.constants.overhead
    token = speed.token
    parts = token.parts | {"hops": speed.hops}
    spent, total = parts[speed.binds], problem.accepted / speed.estimate
    left = problem.accepted / target - (total - spent * overhead)
    change = (
        f"{speed.binds} would have to take {left / overhead * 1e6:.1f} us of a token instead of {spent * 1e6:.1f} us"
        if left > 0
        else f"{speed.binds} takes {spent * 1e6:.1f} us of {total * 1e6:.1f} us a token, and the rest is too much"
    )
    return (
        f"nothing reaches {target:g} tokens/s: the nearest is {reached(plan):.1f} ({plan.strategy}, "
        f"{plan.partition.wafers} wafers of {plan.cores} x {problem.device.hardware.name}), bound by {speed.binds}; "
        f"{change}. {target:g} tokens/s move {needed_bandwidth(problem, target) / 1e12:.3g} TB/s, which is "
        f"{needed_bandwidth(problem, target) / problem.device.hardware.memory_bytes_per_s:.1f} times a device's"
    )


def needed_bandwidth(problem: Problem, target: float) -> float:
    """Bytes/s that a request at `target` tokens/s moves."""
    step = sum(layer.bytes(1, problem.context) for layer in problem.model.layers) + problem.model.head_read
    return step * target / problem.accepted
