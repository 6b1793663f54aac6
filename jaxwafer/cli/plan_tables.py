"""Plans as tables for people."""

from itertools import groupby

from rich.table import Table

from jaxwafer.partition.evaluate import Plan, sweep
from jaxwafer.partition.latency import Seconds
from jaxwafer.partition.target import needed_bandwidth
from jaxwafer.planner import Result
from jaxwafer.roofline.table import amount

# Micro-batches that are printed; all up to 100 are computed.
SHOWN = (1, 2, 4, 8, 16, 32, 64, 100)


def choice_table(result: Result, chosen: Plan) -> Table:
    """A row a plan, the chosen one marked, and why strategies gave none."""
    problem = chosen.problem
    model, hardware = problem.model, problem.device.hardware
    table = _table(
        f"{model.name} on {hardware.name}: {amount(model.weights, 'B')} of weights, at least "
        f"{result.problem.lower_bound} wafers of {result.problem.cores} by bytes, {problem.context} tokens a request",
        "", "strategy", "wafers", "changes", "requests", "bound by", "bandwidth roof", "compute roof", "estimate",
        "each, full", "all", "engine: a wafer", "requests",
    )  # fmt: skip
    for number, plan in enumerate(result.plans, 1):
        speed, own = plan.speed, plan.stored
        mark = ">" if plan is chosen else " "
        table.add_row(
            f"{mark} {number}", plan.strategy.replace("_", "-"), f"{plan.partition.wafers}x{plan.cores}",
            str(plan.changes), str(plan.requests), plan.capacity.binds, rate(speed.bandwidth_roof),
            rate(speed.compute_roof), rate(speed.estimate), rate(speed.each), rate(speed.total),
            amount(own.weights, "B") if own else "n/a", str(own.requests) if own else "n/a",
        )  # fmt: skip
    for name, reason in result.refused.items():
        table.add_row("", name, "none", "", "", reason)
    return table


def wafer_table(plan: Plan) -> Table:
    """Memory and time of each wafer; equal neighbours share a row."""
    table = _table(
        f"{plan.strategy.replace('_', '-')}: {plan.partition.wafers} wafers of {plan.cores}, {plan.requests} requests",
        "wafers", "layers", "kinds", "weights", "vocabulary", "KV", "state", "free", "engine allocates", "time", "binds",
    )  # fmt: skip

    def alike(item) -> tuple:
        wafer = item[1]
        return wafer.kinds, wafer.weights, wafer.vocabulary, wafer.free

    for _, run in groupby(enumerate(plan.wafers), alike):
        rows = list(run)
        first, last, wafer = rows[0][0], rows[-1][0], rows[0][1]
        layers = " ".join(_spans(w.layers) for _, w in rows)
        table.add_row(
            str(first) if first == last else f"{first}-{last}", layers if len(layers) < 30 else layers[:27] + "...",
            wafer.kinds or "none", *(amount(getattr(wafer, n), "B") for n in ("weights", "vocabulary", "kv", "state", "free")),
            amount(plan.stored.weights, "B") if plan.stored else "n/a", time(wafer.service.total), wafer.service.binds,
        )  # fmt: skip
    return table


def breakdown_table(plan: Plan, target: float | None) -> Table:
    """Where a token's time goes, by kind of layer, and what the plan gives."""
    problem, speed = plan.problem, plan.speed
    table = _table(
        "a token's way", "", "count", "bytes", "FLOPs", "bandwidth", "compute", "sums", "fixed", "in all", "binds"
    )
    shares = plan.shares or (1.0,) * problem.count
    batch, context = problem.micro_batch, problem.context
    kinds: dict[str, list[int]] = {}
    for number, layer in enumerate(problem.model.layers):
        kinds.setdefault(layer.kind, []).append(number)
    for kind, numbers in kinds.items():
        layers = [problem.model.layers[n] for n in numbers]
        times = sum(
            (problem.clock.layer(problem.model.layers[n], batch, context, shares[n]) for n in numbers), Seconds()
        )
        table.add_row(
            kind, str(len(numbers)), amount(sum(x.bytes(batch, context) for x in layers), "B"),
            amount(sum(x.flops(batch, context) for x in layers), "FLOP"), *_times(times), times.binds,
        )  # fmt: skip
    table.add_row("hops", str(plan.changes), *[""] * 6, time(speed.hops), "")
    table.add_row("token", "", "", "", *_times(speed.token), speed.binds)
    table.add_section()
    held, hardware = plan.capacity, problem.device.hardware
    limits = f"KV alone {count(held.kv_limit)}, state alone {count(held.state_limit)}"
    table.add_row("requests", str(held.requests), "", "", f"{held.binds} binds on wafer {held.wafer}: {limits}")
    if held.crossover:
        table.add_row("cross-over", f"{held.crossover:,}", "", "", "tokens of context from which KV binds, not state")
    table.add_row("prefill", time(plan.prefill_s), "", "", f"of {problem.context} tokens in an idle pipeline")
    if plan.tokens_per_s_per_mw:
        table.add_row("tokens/s a MW", rate(plan.tokens_per_s_per_mw), "", "", f"{hardware.power_w:g} W a device")
    if plan.usd_per_million_tokens:
        price = f"{hardware.usd_per_hour:g} USD an hour a device"
        table.add_row("USD a million tokens", f"{plan.usd_per_million_tokens:.3g}", "", "", price)
    if target:
        need = amount(needed_bandwidth(problem, target), "B/s")
        table.add_row("target", rate(target), "", "", f"moves {need} for a request alone")
    constants = problem.device.constants
    error = f", {constants.left_out_error:.1%} error on rows left out" if constants.left_out_error is not None else ""
    table.add_row("constants", "", "", "", f"{constants.basis}{error}")
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


def rate(value: float) -> str:
    """tokens/s, in a few digits."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def time(seconds: float) -> str:
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def count(value: int | None) -> str:
    return "none" if value is None else str(value)


def _times(times: Seconds) -> tuple[str, ...]:
    return tuple(time(getattr(times, n)) for n in ("bandwidth", "compute", "sums", "fixed", "total"))


def _spans(layers: tuple[int, ...]) -> str:
    """Layer numbers as runs, such as "0-3,7"."""
    runs = [list(g) for _, g in groupby(layers, key=lambda n, start=iter(range(1 << 30)): n - next(start))]
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs) or "none"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for name in columns:
        left = name in ("", "strategy", "layers", "kinds", "bound by", "binds", "wafers")
        table.add_column(name, justify="left" if left else "right")
    return table
