"""How many requests fit, what binds, and at which context that changes."""

from dataclasses import dataclass

import numpy as np

from jaxwafer.partition.problem import Problem, Proposal

# Contexts up to which the cross-over is looked for.
LONGEST = 1 << 26


@dataclass(frozen=True, kw_only=True)
class Capacity:
    """requests: that all wafers hold at once. wafer: that holds fewest, with binds "KV", "state", "weights" or
    "vocab". kv_limit, state_limit: the requests that would fit were there nothing but KV, or state, beside the
    weights; None where a model has none. crossover: tokens of context from which KV binds and below which state does;
    None where one always does."""

    requests: int
    wafer: int
    binds: str
    kv_limit: int | None
    state_limit: int | None
    crossover: int | None


def capacity(problem: Problem, proposal: Proposal, *, crossover: bool = True) -> Capacity:
    """requests = min over wafers ⌊(memory − weights) / Σ(kv·context + state)⌋, and room for the vocabulary in all.

    With regions, a layer keeps its requests in its own. crossover: also look for it.
    """
    requests, wafer, binds = _at(problem, proposal, problem.context)
    return Capacity(
        requests=int(requests),
        wafer=wafer,
        binds=binds,
        kv_limit=_limit(problem, proposal, [layer.token * layer.seen(problem.context) for layer in problem.layers]),
        state_limit=_limit(problem, proposal, [layer.state for layer in problem.layers]),
        crossover=_crossover(problem, proposal) if crossover else None,
    )


def _limit(problem: Problem, proposal: Proposal, kept: list[int]) -> int | None:
    """Requests that fit where each keeps just so many bytes in each layer."""
    room, limits = problem.room(proposal.partition.wafers), []
    for layers in proposal.partition.layers:
        if bytes_ := sum(kept[n] for n in layers):
            limits.append(max(0, (room - int(problem.weights[list(layers)].sum())) // bytes_))
    return min(limits, default=None)


def _at(problem: Problem, proposal: Proposal, context: int) -> tuple[float, int, str]:
    wafers = proposal.partition.wafers
    room = problem.room(wafers)
    best = (np.inf, 0, "weights")
    used = kept = 0
    for wafer, layers in enumerate(proposal.partition.layers):
        kv = [problem.layers[n].token * problem.layers[n].seen(context) for n in layers]
        state = [problem.layers[n].state for n in layers]
        weights = problem.weights[list(layers)]
        used, kept = used + int(weights.sum()), kept + sum(kv) + sum(state)
        if proposal.shares is None:
            groups = [(room - int(weights.sum()), sum(kv), sum(state))]
        else:
            shares = [proposal.shares[n] for n in layers]
            groups = [(s * room - w, k, t) for s, w, k, t in zip(shares, weights, kv, state, strict=True)]
        for left, tokens, states in groups:
            held = left / (tokens + states) if tokens + states else np.inf
            if left < 0:
                held = 0.0
            if held < best[0]:
                best = (held, wafer, "KV" if tokens >= states else "state")
    if problem.vocabulary == "room" and kept:
        held = (wafers * room - used - problem.model.vocabulary) / kept
        if held < best[0]:
            best = (max(held, 0.0), best[1], "vocab")
    return (np.floor(best[0]) if np.isfinite(best[0]) else 0.0, *best[1:])


def _crossover(problem: Problem, proposal: Proposal) -> int | None:
    """The least context at which KV binds, by bisection; None where it always does, or never."""

    def kv_binds(context: int) -> bool:
        return _at(problem, proposal, context)[2] == "KV"

    if not any(layer.state for layer in problem.layers) or kv_binds(1) or not kv_binds(LONGEST):
        return None
    low, high = 1, LONGEST
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if kv_binds(middle) else (middle, high)
    return high
