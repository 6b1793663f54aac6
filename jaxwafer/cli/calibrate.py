"""`jaxwafer calibrate`: fit a device's constants to measured rows, and score them on rows left out."""

from dataclasses import dataclass
from pathlib import Path

import msgspec
import tyro
from rich.table import Table

from jaxwafer.cli.run import OptionalPath, check_writable, print_table, write_json
from jaxwafer.errors import UserError
from jaxwafer.hardware import read_hardware
from jaxwafer.partition.calibrate import FITTED, Calibration, calibrate, read_rows
from jaxwafer.planner import THIS_MACHINE, open_model


@dataclass(kw_only=True)
class Calibrate:
    """Fit the constants of hardware to measured rows; print each row as a fit without it predicts it."""

    hardware: tyro.conf.Positional[str]
    """a name from meshes/ or a TOML file"""
    rows: OptionalPath = None
    """a TOML file of measured rows (default: those that come with jaxwafer)"""
    json: OptionalPath = None
    """write constants and predictions to this file"""

    def run(self) -> None:
        check_writable(self.json)
        if self.hardware == THIS_MACHINE:
            raise UserError(f"{THIS_MACHINE} has no constants to fit: plan measures its rates")
        device = read_hardware(self.hardware)
        name = Path(self.hardware).stem
        rows = tuple(r for r in read_rows(self.rows) if r.hardware == name)
        if not rows:
            raise UserError(f"there are no measured rows of {name}")
        found = calibrate(device, rows, lambda r: open_model(r.model, weights=r.weights, kv_cache=r.kv_cache))
        print_table(_table(found, device.hardware.name))
        if self.json:
            write_json(self.json, _fields(found))
        if not found.scores:
            return print(f"nothing is fitted: no row of {name} has a set-up that is known")
        print(f"mean error on rows left out {found.left_out_error:.1%}; of the figures alone {found.roof_error:.1%}")
        print("\n[constants]")
        kind = device.hardware.kind
        for constant in FITTED.get(kind, FITTED["*"]):
            print(f"{constant.name} = {getattr(found.constants, constant.name):.4g}")
        for field in ("basis", "date"):
            print(f'{field} = "{getattr(found.constants, field)}"')
        print(f"left_out_error = {found.constants.left_out_error:g}")


def _fields(found: Calibration) -> dict:
    """What `--json` writes."""
    parts = {
        part: [
            msgspec.to_builtins(s.row) | {"roof": s.roof, "predicted": s.predicted, "error": s.error}
            for s in getattr(found, part)
        ]
        for part in ("scores", "compared")
    }
    return {"constants": msgspec.to_builtins(found.constants)} | parts


def _table(found: Calibration, name: str) -> Table:
    table = Table(title=f"{name}: tokens/s of each request", title_justify="left", box=None, padding=(0, 1, 0, 0))
    for column in ("model", "mesh", "batch", "context", "measured", "figures", "predicted", "error", "use"):
        justify = "left" if column in ("model", "use") else "right"
        table.add_column(column, justify=justify, no_wrap=column != "use", overflow="fold")
    for score in (*found.scores, *found.compared):
        row = score.row
        use = "left out of its fit" if row.use == "fit" else f"compared: {row.note}"
        table.add_row(
            row.model, f"{row.wafers}x{row.cores}", str(row.micro_batch), str(row.context), f"{row.tokens_per_s:g}",
            f"{score.roof:.4g}", f"{score.predicted:.4g}", f"{score.error:+.1%}", use,
        )  # fmt: skip
    return table
