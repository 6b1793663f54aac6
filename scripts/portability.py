"""Runs the fixed set of decodes on each platform JAX finds here, and writes what they gave as Markdown and JSON.

The status is 1 where tokens or log-probabilities are not what they should be.
"""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import tyro

from jaxwafer.cli.compile import compile_report
from jaxwafer.cli.run import NOTES, check_writable, use_compilation_cache, write_file, write_json
from jaxwafer.errors import UserError
from jaxwafer.mesh import parse_mesh
from jaxwafer.model import spec_from_config
from jaxwafer.options import Options, prepare
from jaxwafer.portability.cases import MESHES, MODELS, cases
from jaxwafer.portability.measure import Outcome, platform_facts, run_cases
from jaxwafer.portability.report import across, markdown, within
from jaxwafer.quant.formats import FORMATS
from jaxwafer.topology import tpu_target

Recorded = dict[str, Outcome]


@dataclass(kw_only=True)
class Arguments:
    """Run the fixed set of decodes and compare."""

    quick: bool = False
    """a few cases"""
    target: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """also compile every model for this TPU topology, such as v5e:2x2; may be given several times"""
    record: Path | None = None
    """write the tokens and log-probabilities of this platform to this file"""
    check: Path | None = None
    """compare with those that another platform recorded"""
    json: Annotated[Path, tyro.conf.arg(name="json")] = Path("portability.json")
    """the report"""
    markdown: Path = Path("portability.md")
    """the report for people"""


def main(arguments: Arguments) -> int:
    for flag, path in (("--json", arguments.json), ("--markdown", arguments.markdown), ("--record", arguments.record)):
        check_writable(path, flag)
    recorded = read_record(arguments.check) if arguments.check else {}
    use_compilation_cache()
    chosen = cases(arguments.quick)
    found = run_cases(chosen, NOTES.print)
    verdicts = within(chosen, found) + across(found, recorded, str(arguments.check))
    platforms = [{"facts": platform_facts(), "outcomes": found, "verdicts": verdicts}]
    if arguments.record:
        write_file(arguments.record, msgspec.json.encode(found))
    if platforms[0]["facts"]["platform"] != "cpu":
        # The CPU beside it, in a process of its own: JAX takes the platform that comes first.
        report, record = on_cpu(arguments)
        platforms[0]["verdicts"] = verdicts + across(found, record, "cpu")
        platforms += report["platforms"]
    report = {"platforms": platforms, "targets": [t for name in arguments.target for t in compiled(name)]}
    report = json.loads(json.dumps(report, default=asdict))
    write_json(arguments.json, report)
    write_file(arguments.markdown, markdown(report).encode())
    wrong = [
        v for p in report["platforms"] for v in p["verdicts"] if not v["equal"] or v["difference"] > v["tolerance"]
    ]
    for verdict in wrong:
        tokens = "the same tokens" if verdict["equal"] else "other tokens"
        NOTES.print(f"{verdict['case']} against {verdict['like']}: {tokens}, log-probabilities differ by "
                    f"{verdict['difference']:.1e} and may by {verdict['tolerance']:.0e}")  # fmt: skip
    count = sum(len(p["verdicts"]) for p in report["platforms"])
    print(f"{count - len(wrong)} of {count} comparisons hold; {arguments.markdown}, {arguments.json}")
    return 1 if wrong else 0


def on_cpu(arguments: Arguments) -> tuple[dict, Recorded]:
    """The report and the record of this script on the CPU."""
    with tempfile.TemporaryDirectory() as folder:
        files = {name: Path(folder) / name for name in ("json", "markdown", "record")}
        words = [word for name, path in files.items() for word in (f"--{name}", str(path))]
        quick = ["--quick"] if arguments.quick else []
        subprocess.run([sys.executable, __file__, *words, *quick], env=os.environ | {"JAX_PLATFORMS": "cpu"})
        if not files["json"].exists():
            raise UserError("the same set did not run on the CPU; its output above says why")
        return json.loads(files["json"].read_text()), read_record(files["record"])


def compiled(name: str) -> list[dict]:
    """Every model compiled for a TPU topology, in bfloat16."""
    found = []
    for model, fields in MODELS.items():
        spec, mesh = spec_from_config(fields), MESHES[-1]
        target = tpu_target(name, parse_mesh(mesh))
        options = Options(mesh=mesh, max_context=256, prefill_chunk=32, dtype="bf16")
        programs = prepare(spec, lambda _, weight: FORMATS["bf16" if weight.matrix else "f32"], target.mesh, options)
        found.append({"target": name, "model": model, **compile_report(programs, target, options.max_context)})
    return found


def read_record(path: Path) -> Recorded:
    try:
        return msgspec.json.decode(path.read_bytes(), type=Recorded)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"{path} is no record of this script: {error}") from None


if __name__ == "__main__":
    try:
        sys.exit(main(tyro.cli(Arguments, config=(tyro.conf.FlagCreatePairsOff,))))
    except UserError as error:
        print(f"portability: {error}", file=sys.stderr)
        sys.exit(2)
