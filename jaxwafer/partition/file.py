"""A plan as JSON: what `jaxwafer plan` writes and `jaxwafer decode --partition` runs."""

import dataclasses
from pathlib import Path

import msgspec

from jaxwafer.errors import UserError, reason
from jaxwafer.partition.evaluate import Plan, Speed, sweep
from jaxwafer.partition.plan import Partition, Visit
from jaxwafer.partition.simulate import Simulation


class VisitLine(msgspec.Struct, frozen=True):
    wafer: int
    layers: tuple[int, ...]


class PlanLines(msgspec.Struct, frozen=True):
    """The fields of a plan that say how to run it; others are left for people."""

    layers: tuple[tuple[int, ...], ...]
    cores: int
    route: tuple[VisitLine, ...] = ()


class PlanFile(msgspec.Struct, frozen=True):
    plan: PlanLines


def plan_fields(plan: Plan) -> dict:
    """Everything about a plan, as JSON types."""
    hardware = plan.problem.device
    return {
        "strategy": plan.strategy,
        "note": plan.note,
        "model": plan.problem.model.name,
        "hardware": msgspec.to_builtins(hardware),
        "context": plan.problem.context,
        "kv_cache": plan.problem.model.kv_cache,
        "vocabulary": plan.problem.vocabulary,
        "streamed": plan.problem.streamed,
        "wafers": plan.partition.wafers,
        "cores": plan.cores,
        "changes": plan.changes,
        "layers": [list(layers) for layers in plan.partition.layers],
        "route": [{"wafer": v.wafer, "layers": list(v.layers)} for v in plan.partition.route],
        "shares": list(plan.shares) if plan.shares else None,
        "capacity": dataclasses.asdict(plan.capacity),
        "speed": dataclasses.asdict(plan.speed),
        "memory": [dataclasses.asdict(wafer) for wafer in plan.wafers],
        "engine": dataclasses.asdict(plan.stored) if plan.stored else None,
        "engine_refusal": plan.refusal,
        "prefill_s": plan.prefill_s,
        "tokens_per_s_per_mw": plan.tokens_per_s_per_mw,
        "usd_per_million_tokens": plan.usd_per_million_tokens,
    }


def sweep_fields(rows: tuple[tuple[Speed, bool], ...]) -> list[dict]:
    """The micro-batch sweep, as JSON types."""
    names = ("micro_batch", "each", "total", "in_flight", "binds")
    return [{n: getattr(speed, n) for n in names} | {"pareto": best} for speed, best in rows]


def simulation_fields(found: Simulation, plan: Plan) -> dict:
    """A simulation, as JSON types."""
    return {
        "tokens": found.tokens,
        "seconds": found.seconds,
        "steady_tokens_per_s": found.steady,
        "first_token_s": list(found.first_token),
        "tokens_per_s": list(found.each),
        "utilisation": found.utilisation(plan.stations).tolist(),
    }


def document(plan: Plan, others: tuple[Plan, ...], refused: dict[str, str]) -> dict:
    """What `--json` writes: the plan, its micro-batch sweep, the other plans and why strategies gave none."""
    return {
        "plan": plan_fields(plan),
        "sweep": sweep_fields(sweep(plan)),
        "plans": [plan_fields(p) for p in others],
        "refused": refused,
    }


def read_partition(path: Path) -> tuple[Partition, int]:
    """The partition of a plan's JSON file, and its cores a wafer."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=PlanFile).plan
    except OSError as error:
        raise UserError(f"cannot read --partition {path}: {error.strerror}") from None
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise UserError(f"--partition {path} is no plan that jaxwafer plan --json wrote: {reason(error)}") from None
    if found.cores < 1 or not found.layers:
        raise UserError(f"--partition {path}: a plan has at least one wafer and one core")
    return Partition(found.layers, tuple(Visit(v.wafer, v.layers) for v in found.route)), found.cores
