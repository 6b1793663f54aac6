"""`jaxwafer compile`: the real programs compiled for a TPU that need not be here, or lowered for GPUs or CPUs, and what
is then known of them."""

import time
from dataclasses import asdict, dataclass, replace
from functools import partial

import jax
import tyro
from rich.table import Table

from jaxwafer.checkpoint.open import open_config, open_formats
from jaxwafer.cli.lower import lower_report, lower_table
from jaxwafer.cli.run import (
    NOTES,
    ModelFlags,
    OptionalInt,
    OptionalPath,
    check_writable,
    print_table,
    use_compilation_cache,
    write_json,
)
from jaxwafer.errors import UserError
from jaxwafer.mesh import parse_mesh
from jaxwafer.model import spec_from_config
from jaxwafer.options import prepare
from jaxwafer.partition.file import read_partition
from jaxwafer.pipeline.programs import Programs
from jaxwafer.roofline.compiled import Compiled, read
from jaxwafer.roofline.round import counted_bytes, counted_shares, planned_bytes
from jaxwafer.roofline.table import amount
from jaxwafer.topology import PLATFORMS, Target, abstract_mesh, check_target, tpu_target


@dataclass
class Compile(ModelFlags):
    """Compile decoding and prefill for a TPU topology, or lower them for GPUs or CPUs, from a config alone."""

    model: tyro.conf.Positional[str]
    """a name from checkpoints/, a Hugging Face folder, a config.json or a GGUF file"""
    target: str
    """a TPU topology, such as v5e:4x4, v6e:4x4 or tpu7x:4x4x4, to compile for; or cuda or cpu, to lower for"""
    micro_batch: int = 1
    """requests that travel together"""
    micro_batches: OptionalInt = None
    """micro-batches in flight (default: one a wafer)"""
    plan: OptionalPath = None
    """compile the plan that `jaxwafer plan --json` wrote to this file; it says the mesh, where --mesh does not"""
    components: bool = False
    """compile the round twice more, without MLPs and without mixers, and tell by the differences the bytes of each"""
    json: OptionalPath = None
    """write the report to this file"""

    def run(self) -> None:
        check_writable(self.json)
        options = self.options(micro_batch=self.micro_batch, micro_batches=self.micro_batches)
        partition = None
        if self.plan:
            partition, cores = read_partition(self.plan)
            if self.mesh is None:
                options = replace(options, mesh=f"{partition.wafers}x{cores}")
        shape = parse_mesh(options.mesh)
        check_target(self.target, shape)
        if self.components and self.target in PLATFORMS:
            raise UserError(f"--components tells what XLA compiled, but {self.target} is only lowered for")
        spec = spec_from_config(open_config(self.model))
        formats = open_formats(self.model, spec.native, options.weights)
        head = {"model": self.model, "target": self.target, "mesh": options.mesh, "weights": options.weights,
                "kv_cache": options.kv_cache}  # fmt: skip
        if self.target in PLATFORMS:
            mesh = abstract_mesh(self.target, shape)
            programs = prepare(spec, formats, mesh, options, partition=partition)
            report = head | lower_report(programs, self.target, options.max_context)
            print_table(lower_table(report))
        else:
            target = tpu_target(self.target, shape)
            use_compilation_cache()
            programs = prepare(spec, formats, target.mesh, options, partition=partition)
            report = head | compile_report(programs, target, options.max_context)
            if self.components:
                report["round"]["components"] = component_bytes(programs, target, options.max_context, report)
            print_table(compile_table(report, target))
        if self.json:
            write_json(self.json, report)
        if self.target not in PLATFORMS and report["needed_bytes"] > target.memory_bytes:
            raise UserError(
                f"decoding needs {report['needed_bytes'] / 1e9:.1f} GB of each {target.kind}, which has "
                f"{target.memory_bytes / 1e9:.0f} GB: use more wafers or cores, fewer requests or smaller formats"
            )


def compile_report(programs: Programs, target: Target, context: int) -> dict:
    """All that the table says, for `--json`."""
    chunk = programs.sizes.chunk_tokens[-1]
    found, seconds = {}, {}
    for name, build in (
        ("decode", lambda: programs.decode(filters=False)),
        (f"prefill of {chunk}", lambda: programs.prefill(chunk, filters=False)),
        ("one round, unrolled", programs.unrolled),
    ):
        NOTES.print(f"compiling {name} for {target.name}", end="\r" if NOTES.is_terminal else "\n")
        begin = time.perf_counter()
        found[name] = read(
            _compiled(build, target),
            {
                "weights": _placed(programs.abstract_weights, programs.weight_formats),
                "cache": _placed(programs.abstract_cache, programs.cache_formats),
            },
        )
        seconds[name] = time.perf_counter() - begin
    counted = counted_bytes(programs.cache, programs.sizes.batch, context)
    unrolled = found["one round, unrolled"]
    return {
        "device": {"kind": target.kind, "memory_bytes": target.memory_bytes},
        "planned_bytes": planned_bytes(programs.cache),
        "needed_bytes": max(c.peak for n, c in found.items() if n != "one round, unrolled"),
        "round": {"counted_bytes": counted, "xla_bytes": unrolled.accessed, "ratio": unrolled.accessed / counted},
        "programs": {name: _as_json(c) | {"seconds": seconds[name]} for name, c in found.items()},
    }


def component_bytes(programs: Programs, target: Target, context: int, report: dict) -> dict[str, dict[str, float]]:
    """{component: counted and XLA's bytes of a round, and their ratio}.

    XLA's are differences: what a round loses without its MLPs is theirs, and what neither takes with it is the
    embedding's, the head's and everything else's.
    """
    without = {}
    for only, other in (("mixers", "mlps"), ("mlps", "mixers")):
        NOTES.print(f"compiling the round of {only} alone for {target.name}", end="\r" if NOTES.is_terminal else "\n")
        without[other] = read(_compiled(partial(programs.unrolled, only), target), {}).accessed
    whole = report["round"]["xla_bytes"]
    said = {name: whole - nbytes for name, nbytes in without.items()}
    said["rest"] = whole - sum(said.values())
    counted = counted_shares(programs.cache, programs.sizes.batch, context)
    return {n: {"counted_bytes": counted[n], "xla_bytes": said[n], "ratio": said[n] / counted[n]} for n in counted}


def _compiled(build, target: Target):
    try:
        return build()
    except jax.errors.JaxRuntimeError as error:
        lines = str(error).splitlines()
        if "RESOURCE_EXHAUSTED" not in lines[0]:
            raise UserError(f"XLA does not compile this for {target.name}: {lines[0]}") from None
        reason = next((x for x in lines if "Used" in x or "exceed" in x.lower()), lines[0])
        raise UserError(f"the program does not fit a {target.kind}: {reason.strip()}") from None


def _placed(abstract, formats):
    """The abstract arrays with the shardings that the program asked for."""
    return jax.tree.map(lambda a, f: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=f.sharding), abstract, formats)


def _as_json(program: Compiled) -> dict:
    fields = asdict(program)
    fields["collectives"] = [
        {"kind": kind, "bytes": nbytes, "times": times} for (kind, nbytes), times in program.collectives.items()
    ]
    return fields | {"peak": program.peak}


def compile_table(report: dict, target: Target) -> Table:
    table = Table(title=f"{report['model']} on {report['mesh']} of {target.name}", title_justify="left")
    for name in ("", "value", ""):
        table.add_column(name, justify="right" if name else "left")
    memory = report["device"]["memory_bytes"]
    planned = report["planned_bytes"]
    table.add_row("device", target.kind, f"{amount(memory, 'B')} of memory")
    table.add_row("weights, as declared", amount(planned["weights"], "B"), "a device")
    table.add_row("caches, as declared", amount(planned["cache"], "B"), "a device")
    for name, program in report["programs"].items():
        table.add_section()
        table.add_row(name, f"{program['seconds']:.1f} s", "to compile")
        over = program["arguments"] / sum(planned.values()) - 1
        table.add_row("  arguments", amount(program["arguments"], "B"), f"{over:+.1%} of what is declared")
        table.add_row("  temporaries", amount(program["temporaries"], "B"), "")
        table.add_row("  peak", amount(program["peak"], "B"), f"{program['peak'] / memory:.1%} of the device")
        for item in sorted(program["collectives"], key=lambda c: -c["bytes"] * c["times"]):
            table.add_row(f"  {item['kind']}", amount(item["bytes"], "B"), f"{item['times']} in the text")
        for label, times in program["copies"].items():
            table.add_row("  copied whole", label, f"{times} in the text")
        if not program["copies"]:
            table.add_row("  copied whole", "nothing", "no weight and no cache")
    table.add_section()
    counts = report["round"]
    table.add_row("bytes of a round, counted", amount(counts["counted_bytes"], "B"), "a device; full requests")
    table.add_row("bytes of a round, XLA", amount(counts["xla_bytes"], "B"), f"{counts['ratio']:.2f} of the counted")
    for name, part in counts.get("components", {}).items():
        said = f"{part['ratio']:.2f} of {amount(part['counted_bytes'], 'B')} counted"
        table.add_row(f"  {name}", amount(part["xla_bytes"], "B"), said)
    return table
