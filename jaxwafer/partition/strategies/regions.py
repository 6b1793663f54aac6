"""Regions of a wafer: each layer keeps cores of its own, sized so that a token's time is least.

More cores compute faster, but a sum over P cores takes 2√P hops, so beyond P* = (F·P₀ / (C·n·t))^⅔ a layer gets slower
(F FLOPs, C FLOP/s of P₀ cores, n sums, t seconds a hop). Regions also hold their layers' weights and requests, and
cannot be more than the wafer; cores that no layer gains from hold further requests.
"""

import numpy as np

from jaxwafer.errors import UserError
from jaxwafer.partition.chain import fastest
from jaxwafer.partition.problem import Problem, Proposal


def propose(problem: Problem) -> list[Proposal]:
    if problem.streamed:
        raise UserError("regions keep their layers, which --stream-weights does not")
    if problem.device.hardware.fabric is None:
        raise UserError(f"regions need the cores of a wafer's own fabric, which {problem.device.hardware.name} has not")
    partition = problem.search(lambda wafers: fastest(problem, wafers, problem.least))
    shares = np.ones(problem.count)
    for layers in partition.layers:
        if layers:
            shares[list(layers)] = sized(problem, list(layers), partition.wafers)
    return [Proposal(partition=partition, shares=tuple(shares.tolist()), note="a region a layer")]


def best_share(problem: Problem, layer: int) -> float:
    """P* of a layer as a share of the wafer."""
    hardware = problem.device.hardware
    fabric, rate = hardware.fabric, hardware.flops_per_s(problem.compute) * problem.cores
    flops = problem.model.layers[layer].flops(problem.micro_batch, problem.context)
    # Both of a sum's ways of √P hops are in the two.
    cores = (flops * fabric.cores / (rate * fabric.collectives * fabric.hop_s)) ** (2 / 3)
    return min(1.0, cores / fabric.cores)


def sized(problem: Problem, layers: list[int], wafers: int) -> np.ndarray:
    """Shares of the layers of one wafer: what memory demands, towards P* as far as cores go, the rest for requests."""
    keeps = problem.request_bytes[layers]
    need = (problem.weights[layers] + problem.least * keeps + 1) / problem.room(wafers)
    more = np.maximum(need, [best_share(problem, layer) for layer in layers]) - need
    spare = max(0.0, 1.0 - need.sum())
    if more.sum() > spare:
        return need + more * spare / more.sum()
    return need + more + (spare - more.sum()) * (keeps / keeps.sum() if keeps.sum() else 1.0 / len(layers))
