"""`jaxwafer compile --target cuda` and `--target cpu`: the programs lowered for a platform that need not be here."""

import time

from rich.table import Table

from jaxwafer.cli.run import NOTES
from jaxwafer.ops import native
from jaxwafer.ops.gpu_kernel import KERNEL
from jaxwafer.pipeline.programs import Programs
from jaxwafer.roofline.lowered import read_exported
from jaxwafer.roofline.report import operations
from jaxwafer.roofline.round import counted_bytes, planned_bytes
from jaxwafer.roofline.table import amount

UNKNOWN = "memory for temporaries, layouts and copies, bytes that are moved in fact, speed"


def lower_report(programs: Programs, platform: str, context: int) -> dict:
    """All that the table says, for `--json`. platform: a key of `topology.PLATFORMS`."""
    pipeline, place = programs.pipeline, programs.pipeline.placement
    # This builds the native kernels, where they are what runs; by then their names are known.
    backends = pipeline.ops.report(pipeline.dtype, place.formats, place.expert_formats, operations(place.spec))
    kernels = {KERNEL, *native.registered()}
    chunk = programs.sizes.chunk_tokens[-1]
    found = {}
    for name, program in (
        ("decode", programs.decode_program(filters=False, unroll=False)),
        (f"prefill of {chunk}", programs.prefill_program(chunk, filters=False, score=False)),
    ):
        NOTES.print(f"lowering {name} for {platform}", end="\r" if NOTES.is_terminal else "\n")
        begin = time.perf_counter()
        exported = programs.export(program, platform, kernels)
        seconds = time.perf_counter() - begin
        lowered = read_exported(exported, kernels)
        found[name] = {
            "seconds": seconds,
            "module_bytes": lowered.module_bytes,
            "collectives": [
                {"kind": kind, "bytes": nbytes, "times": times} for (kind, nbytes), times in lowered.collectives.items()
            ],
            "kernels": lowered.kernels,
        }
    return {
        "planned_bytes": planned_bytes(programs.cache),
        "round": {"counted_bytes": counted_bytes(programs.cache, programs.sizes.batch, context)},
        "backends": backends,
        "programs": found,
        "unknown": UNKNOWN,
    }


def lower_table(report: dict) -> Table:
    table = Table(title=f"{report['model']} on {report['mesh']}, lowered for {report['target']}", title_justify="left")
    for name in ("", "value", ""):
        table.add_column(name, justify="right" if name else "left")
    table.add_row("weights, as declared", amount(report["planned_bytes"]["weights"], "B"), "a device")
    table.add_row("caches, as declared", amount(report["planned_bytes"]["cache"], "B"), "a device")
    table.add_row("bytes of a round, counted", amount(report["round"]["counted_bytes"], "B"), "a device; full requests")
    table.add_section()
    for operation, taken in report["backends"].items():
        table.add_row(operation, taken["backend"], taken["reason"])
    for name, program in report["programs"].items():
        table.add_section()
        table.add_row(name, f"{program['seconds']:.1f} s", "to lower")
        table.add_row("  StableHLO module", amount(program["module_bytes"], "B"), "")
        for item in sorted(program["collectives"], key=lambda c: -c["bytes"] * c["times"]):
            table.add_row(f"  {item['kind']}", amount(item["bytes"], "B"), f"{item['times']} in the text")
        for kernel, times in program["kernels"].items():
            table.add_row("  kernel", f"{times} in the text", kernel)
    table.add_section()
    table.add_row("not known here", "", report["unknown"])
    return table
