"""Plans as tables for people."""

from itertools import groupby

import numpy as np
from rich.table import Table

from jaxwafer.partition.evaluate import Plan, sweep
from jaxwafer.partition.latency import Seconds
from jaxwafer.partition.plan import spans
from jaxwafer.partition.simulate import Simulation
from jaxwafer.partition.target import needed_bandwidth
from jaxwafer.planner import Result
from jaxwafer.roofline.table import amount

# Columns of text that a narrow terminal may break.
WRAPPED = ("", "strategy", "layers", "kinds", "remark")
# Micro-batches that are printed; all up to 100 are computed.
SHOWN = (1, 2, 4, 8, 16, 32, 64, 100)


def choice_table(result: Result, chosen: Plan) -> Table:
    """A row a plan, the chosen one marked; speeds in tokens/s."""
    problem = result.problem
    model = problem.model
    table = _table(
        f"{model.name} on {problem.device.hardware.name}: {amount(model.weights, 'B')} of weights, at least "
        f"{problem.lower_bound} wafers of {problem.cores} by bytes, {problem.context} tokens a request",
        "", "strategy", "wafers", "hops", "requests", "bound\nby", "bytes\nroof", "FLOPs\nroof", "estimate", "all",
        "engine\nholds",
    )  # fmt: skip
    for number, (plan, names) in enumerate(result.distinct, 1):
        speed = plan.speed
        table.add_row(
            f"{'>' if plan is chosen else ' '}{number}", ", ".join(n.replace("_", "-") for n in names),
            f"{plan.partition.wafers}x{plan.cores}", str(plan.changes), str(plan.requests), plan.capacity.binds,
            rate(speed.bandwidth_roof), rate(speed.compute_roof), rate(speed.estimate), rate(speed.total),
            str(plan.stored.requests) if plan.stored else "n/a",
        )  # fmt: skip
    return table


def wafer_table(plan: Plan) -> Table:
    """Memory and time of each wafer; equal neighbours share a row."""
    fields = {"weights": "weights", "external": "external", "vocab": "vocabulary", "KV": "kv", "state": "state",
              "free": "free"}  # fmt: skip
    if not plan.problem.streamed:
        fields.pop("external")
    table = _table(
        f"{plan.strategy.replace('_', '-')}: {plan.partition.wafers} wafers of {plan.cores}, {plan.requests} requests",
        "wafers", "layers", "kinds", *fields, "time",
    )  # fmt: skip

    def alike(item) -> tuple:
        wafer = item[1]
        return wafer.kinds, wafer.weights, wafer.vocabulary, wafer.free

    for _, run in groupby(enumerate(plan.wafers), alike):
        rows = list(run)
        first, last, wafer = rows[0][0], rows[-1][0], rows[0][1]
        layers = " ".join(spans(w.layers) for _, w in rows)
        memory = (amount(getattr(wafer, n), "B") for n in fields.values())
        table.add_row(
            str(first) if first == last else f"{first}-{last}", layers if len(layers) < 24 else layers[:21] + "...",
            wafer.kinds or "none", *memory, time(wafer.service.total),
        )  # fmt: skip
    return table


def breakdown_table(plan: Plan) -> Table:
    """Where a token's time goes, by kind of layer."""
    problem, speed = plan.problem, plan.speed
    causes = {"memory": "bandwidth", "compute": "compute", "stream": "streaming", "sums": "sums", "fixed": "fixed",
              "in all": "total"}  # fmt: skip
    if not problem.streamed:
        causes.pop("stream")
    table = _table("a token's way", "", "count", "bytes", "FLOPs", *causes, "binds")

    def seconds(times: Seconds) -> tuple[str, ...]:
        return tuple(time(getattr(times, cause)) for cause in causes.values())

    shares = plan.shares or (1.0,) * problem.count
    batch, context = problem.micro_batch, problem.context
    kinds: dict[str, list[int]] = {}
    for number, layer in enumerate(problem.model.layers):
        kinds.setdefault(layer.kind, []).append(number)
    for kind, numbers in kinds.items():
        layers = [(problem.model.layers[n], shares[n]) for n in numbers]
        times = sum((problem.clock.layer(layer, batch, context, share) for layer, share in layers), Seconds())
        table.add_row(
            kind, str(len(numbers)), amount(sum(x.bytes(batch, context) for x, _ in layers), "B"),
            amount(sum(x.flops(batch, context) for x, _ in layers), ""), *seconds(times), times.binds,
        )  # fmt: skip
    table.add_row("hops", str(plan.changes), *[""] * (len(causes) + 1), time(speed.hops), "")
    table.add_row("token", "", "", "", *seconds(speed.token), speed.binds)
    return table


def outcome_table(plan: Plan, target: float | None) -> Table:
    """What the plan gives."""
    problem, held, hardware = plan.problem, plan.capacity, plan.problem.device.hardware
    table = _table("outcome", "", "value", "remark")
    limits = f"KV alone {count(held.kv_limit)}, state alone {count(held.state_limit)}"
    place = "in a layer's region of" if plan.shares else "on"
    table.add_row("requests", str(held.requests), f"{held.binds} binds {place} wafer {held.wafer}: {limits}")
    if plan.shares:
        remark = f"a layer, sized for speed with {problem.least} requests; --requests makes them hold more"
        table.add_row("regions", str(problem.count), remark)
    if held.crossover:
        table.add_row("cross-over", f"{held.crossover:,}", "tokens of context from which KV binds, not state")
    if own := plan.stored:
        remark = (
            "on every wafer: two slots of layers, one running and one coming in, and the vocabulary"
            if problem.streamed
            else f"of weights on every wafer, as stacks are equally deep: {amount(own.padding, 'B')} are padding in all"
        )
        table.add_row("engine allocates", amount(own.weights, "B"), remark)
        table.add_row("engine holds", str(own.requests), "requests in what is left")
    if plan.refusal:
        table.add_row("engine", "refuses", plan.refusal)
    table.add_row("prefill", time(plan.prefill_s), f"of {problem.context} tokens in an idle pipeline")
    if plan.tokens_per_s_per_mw:
        table.add_row("tokens/s a MW", rate(plan.tokens_per_s_per_mw), f"{hardware.power_w:g} W a device")
    if plan.usd_per_million_tokens:
        price = f"{hardware.usd_per_hour:g} USD an hour a device"
        table.add_row("USD a million tokens", f"{plan.usd_per_million_tokens:.3g}", price)
    if target:
        need = amount(needed_bandwidth(problem, target), "B/s")
        table.add_row("target", rate(target), f"moves {need} for a request alone")
    constants = problem.device.constants
    error = f", {constants.left_out_error:.1%} error on rows left out" if constants.left_out_error is not None else ""
    table.add_row("constants", constants.date, f"{constants.basis}{error}")
    return table


def sweep_table(plan: Plan) -> Table:
    table = _table("micro-batches", "size", "in flight", "each", "all", "binds", "Pareto")
    for speed, best in sweep(plan):
        if speed.micro_batch in SHOWN:
            table.add_row(
                str(speed.micro_batch), str(speed.in_flight), rate(speed.each), rate(speed.total), speed.binds,
                "*" if best else "",
            )  # fmt: skip
    return table


def simulation_table(plan: Plan, found: Simulation) -> Table:
    """What a simulation gave, beside the closed form."""
    table = _table(f"simulated: {len(found.each)} requests", "", "value", "remark")
    table.add_row(
        "all, steady", rate(found.steady), f"tokens/s; the closed form gives {rate(plan.speed.total)} when full"
    )
    table.add_row("each, mean", rate(float(np.mean(found.each))), "tokens/s")
    for name, share in (("median", 50), ("99th percentile", 99)):
        first = float(np.percentile(found.first_token, share))
        table.add_row(f"time to first token, {name}", time(first), "from arrival, queueing and prefill included")
    busy = found.utilisation(plan.stations)
    table.add_row("busiest station", f"{busy.max():.0%}", f"of the time at work; the mean is {busy.mean():.0%}")
    return table


def rate(value: float) -> str:
    """tokens/s, in a few digits."""
    for least, size, prefix in ((1e9, 1e9, "G"), (1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / size:.3g}{prefix}"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def time(seconds: float) -> str:
    if seconds == 0:
        return "0"
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def count(value: int | None) -> str:
    return "none" if value is None else str(value)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))
    for name in columns:
        left = name in ("", "strategy", "layers", "kinds", "bound\nby", "binds", "wafers", "remark")
        table.add_column(name, justify="left" if left else "right", no_wrap=name not in WRAPPED, overflow="fold")
    return table
