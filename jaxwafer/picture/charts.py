"""Charts of a plan, each drawn into given axes: the wafer strip, Pareto points, a token's time, requests by context."""

from dataclasses import replace

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch

from jaxwafer.partition.capacity import capacity
from jaxwafer.partition.evaluate import Plan, pareto, sweep
from jaxwafer.partition.plan import Partition, spans
from jaxwafer.partition.problem import Proposal

# What fills a wafer's memory, from the bottom up, and its colour.
FILLS = {
    "weights": "#4c6a92",
    "vocabulary": "#8c7bb5",
    "kv": "#e0a458",
    "state": "#6fa287",
    "free": "#e9e9e6",
}
NAMES = {"weights": "weights", "vocabulary": "vocabulary", "kv": "KV", "state": "state", "free": "free"}
INK, ACCENT = "#333333", "#b5423c"
# Wafers of which each is named.
MOST_NAMED = 90


def revisits(partition: Partition) -> list[tuple[int, int]]:
    """(from, to) wafers of the changes that lead back to a wafer that was passed before."""
    seen, found = set(), []
    visits = [v for v in partition.visits if v.layers]
    for last, visit in zip([None, *visits], visits, strict=False):
        if visit.wafer in seen and last is not None and last.wafer != visit.wafer:
            found.append((last.wafer, visit.wafer))
        seen.add(visit.wafer)
    return found


def strip(axes: Axes, plan: Plan) -> None:
    """Each wafer's memory, filled; its layers; and over it the token's way, with changes back to an earlier wafer."""
    wafers = np.arange(len(plan.wafers))
    bottom = np.zeros(len(wafers))
    for name, colour in FILLS.items():
        height = np.array([max(getattr(w, name), 0) for w in plan.wafers]) / 1e9
        axes.bar(wafers, height, 0.86, bottom, color=colour, label=NAMES[name])
        bottom += height
    top = bottom.max()
    named = len(wafers) <= MOST_NAMED
    axes.set_xticks(
        wafers, [spans(w.layers) for w in plan.wafers] if named else wafers.astype(str), rotation=90, fontsize=6
    )
    axes.set_xlabel("layers of each wafer" if named else "wafer", fontsize=8)
    axes.set_ylabel("GB")
    if len(wafers) > 1:
        axes.annotate("", (wafers[-1] + 0.5, 1.06 * top), (-0.5, 1.06 * top),
                      arrowprops={"arrowstyle": "->", "color": INK, "lw": 0.8})  # fmt: skip
    for start, end in revisits(plan.partition):
        arc = FancyArrowPatch(
            (start, 1.06 * top), (end, 1.02 * top), connectionstyle="arc3,rad=0.35", arrowstyle="->", mutation_scale=6,
            color=ACCENT, lw=0.6,
        )  # fmt: skip
        axes.add_patch(arc)
    axes.set_ylim(0, 1.3 * top)
    axes.set_xlim(-0.8, len(wafers) - 0.2)
    back = len(revisits(plan.partition))
    axes.set_title(
        f"{plan.problem.model.name}, {plan.strategy.replace('_', '-')}: {len(wafers)} wafers, {plan.requests} requests "
        f"of {plan.problem.context:,} tokens, {plan.changes} changes of wafers ({back} to an earlier one)",
        fontsize=9, loc="left",
    )  # fmt: skip
    axes.legend(ncols=5, fontsize=7, frameon=False, loc="upper right")


def speeds(axes: Axes, plan: Plan) -> None:
    """tokens/s of each request against all of them, over micro-batches; the Pareto points joined."""
    rows = sweep(plan)
    axes.scatter(
        [s.each for s, _ in rows], [s.total for s, _ in rows], s=8, color="#b9b9b4", label="micro-batch 1 to 100"
    )
    best = [s for s, marked in rows if marked]
    axes.plot([s.each for s in best], [s.total for s in best], "o-", ms=3, lw=1, color=FILLS["weights"], label="Pareto")
    for speed in (best[0], best[-1]):
        axes.annotate(f"{speed.micro_batch}", (speed.each, speed.total), fontsize=7, xytext=(3, 3),
                      textcoords="offset points")  # fmt: skip
    axes.set(xlabel="tokens/s of each request", ylabel="tokens/s of all", title="micro-batches")
    axes.legend(fontsize=7, frameon=False)


def choices(axes: Axes, plans: tuple[Plan, ...], chosen: Plan) -> None:
    """Devices against requests of all plans, the chosen one ringed; those that no other outdoes are filled."""
    best = pareto([(-p.devices, p.requests, p.speed.estimate) for p in plans])
    for number, plan in enumerate(plans):
        fill = FILLS["weights"] if number in best else "none"
        axes.scatter(plan.devices, max(plan.requests, 0.8), s=40, facecolor=fill, edgecolor=FILLS["weights"], zorder=2)
    axes.scatter(chosen.devices, max(chosen.requests, 0.8), s=120, facecolor="none", edgecolor=ACCENT, zorder=3)
    known = set()
    for plan in plans:
        if (plan.devices, plan.requests) not in known:
            axes.annotate(plan.strategy.replace("_", "-"), (plan.devices, max(plan.requests, 0.8)), fontsize=6,
                          xytext=(4, 4), textcoords="offset points")  # fmt: skip
        known.add((plan.devices, plan.requests))
    axes.set_yscale("log")
    axes.set(xlabel="devices", ylabel="requests", title="plans (filled: not outdone)")


def waterfall(axes: Axes, plan: Plan) -> None:
    """From the time that memory bandwidth alone would take to the estimate."""
    speed = plan.speed
    token = speed.token
    beyond = token.total - speed.hops - token.sums - token.fixed - token.bandwidth
    parts = {
        "bandwidth\nroof": token.bandwidth,
        "streaming" if plan.problem.streamed else "compute,\nefficiency": beyond, "sums": token.sums,
        "overhead": token.fixed, "hops": speed.hops,
    }  # fmt: skip
    unit, name = (1e3, "ms") if token.total >= 1e-3 else (1e6, "us")
    at = 0.0
    for number, seconds in enumerate(parts.values()):
        axes.bar(number, seconds * unit, 0.7, at * unit, color=FILLS["weights"] if not number else FILLS["kv"])
        at += seconds
        axes.annotate(f"{seconds * unit:.3g}", (number, at * unit), ha="center", fontsize=7, xytext=(0, 2),
                      textcoords="offset points")  # fmt: skip
    axes.bar(len(parts), at * unit, 0.7, color=FILLS["state"])
    axes.annotate(f"{at * unit:.3g}", (len(parts), at * unit), ha="center", fontsize=7, xytext=(0, 2),
                  textcoords="offset points")  # fmt: skip
    axes.set_xticks(range(len(parts) + 1), [*parts, "estimate"], fontsize=6)
    axes.set(ylabel=f"{name} a token", title=f"a token's time: {speed.estimate:,.3g} tokens/s, bound by {speed.binds}")
    axes.margins(y=0.12)


def contexts(axes: Axes, plan: Plan) -> None:
    """Requests that fit against context, what KV and state alone would allow, and where they cross."""
    problem = plan.problem
    most = problem.model.max_context or 4 * problem.context
    at = np.unique(np.geomspace(min(512, most), most, 24).astype(int))
    proposal = Proposal(partition=plan.partition, shares=plan.shares)
    held = [capacity(replace(problem, context=int(n)), proposal, crossover=False) for n in at]
    for name, colour in (("kv_limit", FILLS["kv"]), ("state_limit", FILLS["state"])):
        limits = [getattr(h, name) for h in held]
        if limits[0] is not None:
            label = f"{NAMES[name.split('_')[0]]} alone"
            axes.plot(at, np.maximum(limits, 0.5), lw=1.2, ls="--", color=colour, label=label)
    axes.plot(at, np.maximum([h.requests for h in held], 0.5), lw=1.8, color=INK, label="requests that fit")
    axes.plot(problem.context, max(plan.requests, 0.5), "o", color=ACCENT)
    if plan.capacity.crossover:
        axes.axvline(plan.capacity.crossover, color=ACCENT, lw=0.8)
        axes.annotate(f" {plan.capacity.crossover:,}", (plan.capacity.crossover, 0.9), fontsize=7, color=ACCENT,
                      xycoords=("data", "axes fraction"))  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="tokens of context", ylabel="requests", title="requests against context")
    axes.legend(fontsize=7, frameon=False)
