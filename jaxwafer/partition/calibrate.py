"""Fitting the constants of a device to measured rows, scored on rows left out.

A row is a rate that somebody measured with a set-up that is known. Constants are fitted to the logarithms of the times
by least squares (scipy); each row is then predicted by a fit on all the others. Rows whose set-up is not known are
compared, never fitted.
"""

import datetime
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from jaxwafer.data_dir import data_folder
from jaxwafer.errors import UserError, reason
from jaxwafer.hardware import Constants, Count, Description, Positive
from jaxwafer.partition.evaluate import speed
from jaxwafer.partition.needs import Model
from jaxwafer.partition.plan import uniform
from jaxwafer.partition.problem import Problem, Proposal


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """tokens_per_s: of each request. cores: devices of a stage. use: "fit", or "compare" where note says what is not
    known."""

    model: str
    hardware: str
    wafers: Count
    cores: Count
    micro_batch: Count
    context: Count
    tokens_per_s: Positive
    weights: str
    kv_cache: str
    date: str
    source: str
    use: Literal["fit", "compare"]
    note: str = ""


class Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    row: tuple[Row, ...]


@dataclass(frozen=True)
class Fitted:
    """A constant that is fitted: its start and its bounds."""

    name: str
    start: float
    low: float
    high: float


# What is fitted, by kind of device. On wafers two rows bear one constant.
FITTED = {
    "wafer": (Fitted("overhead", 4.0, 1.0, 100.0),),
    "*": (
        Fitted("bandwidth_efficiency", 0.9, 0.05, 1.0),
        Fitted("link_efficiency", 0.8, 0.02, 1.0),
        Fitted("collective_s", 3e-6, 0.0, 1e-3),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Score:
    """A row, what the figures alone predict, what a fit without the row (or, compared, on all rows) predicts."""

    row: Row
    roof: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the predicted tokens/s."""
        return self.predicted / self.row.tokens_per_s - 1.0


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """constants: fitted on all rows. scores: each row by a fit on the others. compared: rows that are not fitted."""

    constants: Constants
    scores: tuple[Score, ...]
    compared: tuple[Score, ...]

    @property
    def left_out_error(self) -> float:
        return float(np.mean([abs(s.error) for s in self.scores]))

    @property
    def roof_error(self) -> float:
        return float(np.mean([abs(s.roof / s.row.tokens_per_s - 1.0) for s in self.scores]))


def read_rows(path: Path | None = None) -> tuple[Row, ...]:
    """The rows of a TOML file, by default those that come with jaxwafer."""
    path = path or data_folder("meshes") / "measured" / "rows.toml"
    try:
        return msgspec.toml.decode(path.read_bytes(), type=Rows).row
    except OSError as error:
        raise UserError(f"cannot read --rows {path}: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--rows {path} has no measured rows as they should be: {reason(error)}") from None


def calibrate(device: Description, rows: tuple[Row, ...], models: Callable[[Row], Model]) -> Calibration:
    """Fit the device's constants to rows of this hardware; where none has a known set-up they stay as they are.

    models: the planner's view of a row's model.
    """
    # Takes most of a second, which other commands need not wait for.
    from scipy.optimize import least_squares

    needs = {}
    for row in rows:
        key = (row.model, row.weights, row.kv_cache)
        if key not in needs:
            needs[key] = models(row)
    hardware, kind = device.hardware, device.hardware.kind
    fitted = FITTED.get(kind, FITTED["*"])
    known = [r for r in rows if r.use == "fit"]
    if known and len(known) <= len(fitted):
        raise UserError(
            f"{len(known)} rows of {hardware.name} with a known set-up are too few for {len(fitted)} constants "
            "and a row to leave out"
        )

    def predict(row: Row, constants: Constants) -> float:
        model = needs[row.model, row.weights, row.kv_cache]
        problem = Problem(
            model=model,
            device=msgspec.structs.replace(device, constants=constants),
            context=row.context,
            cores=row.cores,
            micro_batch=row.micro_batch,
        )
        proposal = Proposal(
            partition=uniform(problem.count, row.wafers),
            shares=(row.wafers / problem.count,) * problem.count if hardware.fabric else None,
        )
        return speed(problem, proposal, row.micro_batch, row.micro_batch).estimate

    none = Constants(basis="none", date="")
    # What is not fitted stays as it is.
    given = msgspec.structs.replace(device.constants, **{f.name: getattr(none, f.name) for f in fitted})

    def fit(on: list[Row]) -> Constants:
        def residuals(x: np.ndarray) -> list[float]:
            constants = msgspec.structs.replace(given, **named(x))
            return [math.log(predict(r, constants) / r.tokens_per_s) for r in on]

        # In units of the starts, so that microseconds and shares weigh alike.
        unit = np.array([f.start for f in fitted])

        def named(x: np.ndarray) -> dict[str, float]:
            return {f.name: float(min(max(v, f.low), f.high)) for f, v in zip(fitted, x * unit, strict=True)}

        bounds = [f.low for f in fitted] / unit, [f.high for f in fitted] / unit
        found = least_squares(residuals, np.ones(len(fitted)), bounds=bounds)
        return msgspec.structs.replace(given, **named(found.x))

    def compare(constants: Constants) -> tuple[Score, ...]:
        unknown = (r for r in rows if r.use == "compare")
        return tuple(Score(row=r, roof=predict(r, none), predicted=predict(r, constants)) for r in unknown)

    if not known:
        return Calibration(constants=device.constants, scores=(), compared=compare(device.constants))
    scores = tuple(
        Score(row=r, roof=predict(r, none), predicted=predict(r, fit([o for o in known if o is not r]))) for r in known
    )
    error = float(np.mean([abs(s.error) for s in scores]))
    models_fitted = ", ".join(dict.fromkeys(f"{r.model} on {r.wafers}x{r.cores}" for r in known))
    constants = msgspec.structs.replace(
        fit(known),
        basis=f"fitted to {len(known)} rows: {models_fitted}",
        date=datetime.date.today().isoformat(),
        left_out_error=round(error, 4),
    )
    return Calibration(constants=constants, scores=scores, compared=compare(constants))
