"""The roofline report as a table for people."""

from rich.table import Table


def amount(value: float | None, unit: str) -> str:
    """A number with an SI prefix, such as "1.25 GB"."""
    if value is None:
        return "n/a"
    for size, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def roofline_table(report: dict) -> Table:
    """Rows of (what, how much, remark) of a report made by `roofline.report`."""
    roof, totals, memory, mesh = (report[k] for k in ("roofline", "totals", "memory", "mesh"))
    table = Table(
        title=f"{report['model']} on {mesh['wafers']}x{mesh['cores']} ({mesh['device']})", title_justify="left"
    )
    table.add_column("roofline")
    table.add_column("value", justify="right")
    table.add_column("")

    def row(name: str, value: str, remark: str = "") -> None:
        table.add_row(name, value, remark)

    def rate(value: float | None) -> str:
        return "n/a" if value is None else f"{value:.1f} tok/s"

    row("prefill", rate(totals["prefill_tokens_per_s"]), f"{totals['prefill_tokens']} prompt tokens")
    row("decode, all requests", rate(totals["decode_tokens_per_s"]), f"{totals['decode_tokens']} tokens")
    each = [o["tokens_per_s"] for o in report["outputs"] if o["tokens_per_s"]]
    if each:
        row("decode, each request", rate(sum(each) / len(each)), f"mean of {len(each)}")
    first = [o["ttft_s"] for o in report["outputs"]]
    if first:
        row("time to first token", f"{min(first):.3f} s", f"at most {max(first):.3f} s")
    table.add_section()
    total = roof["bytes_per_token"]["total"]
    for name, nbytes in roof["bytes_per_token"].items():
        share = f"{nbytes / total:.1%}" if total and name != "total" else ""
        row(f"bytes a token: {name}", amount(nbytes, "B"), share)
    if total:
        row(
            "  of it padding",
            amount(roof["padding_bytes_per_token"], "B"),
            f"{roof['padding_bytes_per_token'] / total:.1%}",
        )
    if stream := report.get("streaming"):
        row("bytes a token: streamed", amount(stream["bytes_per_token"], "B"),
            f"from host memory at {amount(stream['ceiling_bytes_per_s'], 'B/s')}, measured: "
            f"at most {rate(stream['bound_tokens_per_s'])}")  # fmt: skip
    row("FLOPs a token", amount(roof["flops_per_token"], "FLOP"))
    table.add_section()
    before, after = roof["ceiling_before_after_bytes_per_s"]
    drift = f"measured: {amount(before, 'B/s')} before, {amount(after, 'B/s')} after"
    row("bandwidth ceiling", amount(roof["ceiling_bytes_per_s"], "B/s"), drift)
    row("bandwidth achieved", amount(roof["achieved_bytes_per_s"], "B/s"))
    row("MBU", f"{roof['mbu']:.1%}", roof["fault"] or "achieved / ceiling")
    row(
        "compute achieved",
        amount(roof["achieved_flops_per_s"], "FLOP/s"),
        f"of {amount(roof['ceiling_flops_per_s'], 'FLOP/s')}",
    )
    shares = roof["seconds"]
    parts = ("bandwidth", "streaming", "compute", "latency", "host")
    spent = ", ".join(f"{k} {shares[k]:.2f} s" for k in parts if k in shares)
    row("bound by", roof["bound"] or "n/a", spent)
    table.add_section()
    row("tick", f"{roof['tick_s'] * 1e3:.2f} ms", f"{roof['ticks']} ticks")
    row("bubble", f"{roof['bubble_fraction']:.1%}", "of wafer ticks had no request")
    row("wafer imbalance", f"{roof['imbalance']:.3f}", "busiest wafer over the mean")
    row("compiled", f"{report['compile']['count']} programs", f"{report['compile']['seconds']:.1f} s")
    needed = memory["weights_bytes_per_wafer"]
    row("weights a wafer", amount(memory["weights_allocated_bytes_per_wafer"], "B"),
        f"{amount(min(needed), 'B')} to {amount(max(needed), 'B')} needed")  # fmt: skip
    row("KV cache a wafer", amount(memory["kv_allocated_bytes_per_wafer"], "B"), f"{memory['kv_tokens']} tokens")
    row("peak memory", amount(memory["peak_device_bytes"] or memory["peak_host_bytes"], "B"),
        "of a device" if memory["peak_device_bytes"] else "of the process")  # fmt: skip
    for operation, backend in report["backends"].items():
        row(operation, backend["backend"], backend["reason"])
    return table
