"""Tensor and expert width: the same devices as many narrow wafers, or as few wide ones.

A wide wafer reads a layer faster but sums over more devices. For each width, a power of two up to what fast links join,
the min-max pipeline on the devices given (or on as few wafers as hold it).
"""

from dataclasses import replace

from jaxwafer.errors import UserError
from jaxwafer.partition.chain import fastest
from jaxwafer.partition.problem import Problem, Proposal


def propose(problem: Problem) -> list[Proposal]:
    devices = problem.wafers * problem.cores if problem.wafers else None
    found, refused = [], None
    for cores in widths(problem.device.hardware.domain):
        if devices and devices % cores:
            continue
        wide = replace(problem, cores=cores, wafers=devices // cores if devices else None)
        try:
            partition = wide.search(lambda wafers, wide=wide: fastest(wide, wafers, wide.least))
        except UserError as error:
            refused = error
            continue
        found.append(Proposal(partition=partition, cores=cores, note=f"{cores} devices a wafer"))
    if not found:
        raise refused or UserError(f"{devices} devices divide into no width of {problem.device.hardware.name}")
    return found


def widths(most: int) -> list[int]:
    """Powers of two up to `most`, and `most`."""
    return sorted({2**n for n in range(most.bit_length()) if 2**n <= most} | {most})
