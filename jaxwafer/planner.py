"""The planner from Python: a model and a device in, plans out. `jaxwafer plan` prints what this returns."""

import datetime
from dataclasses import dataclass, replace
from pathlib import Path

import jax.numpy as jnp
import msgspec

from jaxwafer.checkpoint.open import open_config, open_formats
from jaxwafer.errors import UserError
from jaxwafer.hardware import Constants, Description, Hardware, read_hardware
from jaxwafer.mesh import MeshShape, device_memory, make_mesh
from jaxwafer.model import spec_from_config
from jaxwafer.partition.evaluate import Plan, evaluate
from jaxwafer.partition.needs import Model, model_needs
from jaxwafer.partition.problem import Problem
from jaxwafer.partition.strategies import NAMES, strategy
from jaxwafer.partition.target import fewest
from jaxwafer.roofline.ceiling import compute_ceiling, read_ceiling, tick_latency

DEFAULT_CONTEXT = 8192
THIS_MACHINE = "this-machine"


@dataclass(frozen=True)
class Result:
    """plans: of all strategies. refused: strategy → why it gave none. best: of those with as many cores a wafer as
    asked for the plan of fewest wafers, then most requests, then tokens/s; with a target, the one that reaches it."""

    problem: Problem
    plans: tuple[Plan, ...]
    refused: dict[str, str]
    best: Plan

    @property
    def distinct(self) -> tuple[tuple[Plan, tuple[str, ...]], ...]:
        """Plans that place layers differently, each with the strategies that found it."""
        found: dict[tuple, tuple[Plan, list[str]]] = {}
        for p in self.plans:
            found.setdefault((p.partition, p.cores, p.shares), (p, []))[1].append(p.strategy)
        return tuple((p, tuple(dict.fromkeys(names))) for p, names in found.values())


def plan(model: str | Path, hardware: str = THIS_MACHINE, *, strategy: str = "all", context: int | None = None,
         weights: str = "native", kv_cache: str = "bf16", target_tokens_per_second: float | None = None,
         figures: tuple[str, ...] = (), **fields) -> Result:  # fmt: skip
    """Plans of a model (card, folder, config.json, GGUF) on hardware (a name or file, or "this-machine").

    context: tokens of a request, by default 8192 or what the model has. figures: "hop_s=28e-6", of the hardware or of
    its constants. fields: further fields of `partition.problem.Problem`. What cannot be is a UserError.

    >>> plan("llama-3.1-70b", "wse-3", strategy="minmax").best.partition.wafers
    4
    """
    needs = open_model(model, weights=weights, kv_cache=kv_cache)
    device = with_figures(measured() if hardware == THIS_MACHINE else read_hardware(hardware), figures)
    context = min(DEFAULT_CONTEXT, needs.max_context) if context is None else context
    return solve(Problem(model=needs, device=device, context=context, **fields), strategy, target_tokens_per_second)


def open_model(model: str | Path, *, weights: str = "native", kv_cache: str = "bf16") -> Model:
    """The planner's view of a model, by its checkpoint where there is one, otherwise by its config alone."""
    spec = spec_from_config(open_config(model))
    return model_needs(str(model), spec, open_formats(model, spec.native, weights), kv_cache=kv_cache)


def solve(problem: Problem, strategies: str = "all", target: float | None = None) -> Result:
    """Plans by one strategy, by several separated by commas, or by all."""
    names = NAMES if strategies == "all" else tuple(strategies.split(","))
    plans, refused = [], {}
    if target is not None:
        if not 0 < target < 1e12:
            raise UserError(f"--target-tokens-per-second must be a positive number, not {target:g}")
        if problem.wafers is not None or problem.cores > 1:
            raise UserError("--target-tokens-per-second looks for wafers and cores: do not give --wafers or --cores")
        plans.append(fewest(problem, target))
        problem = replace(problem, wafers=plans[0].partition.wafers, cores=plans[0].cores)
    # A wafer may hold nothing but its part of the vocabulary.
    spare = max(1, problem.vocabulary_wafers)
    if problem.wafers is not None and problem.wafers > problem.count + spare:
        raise UserError(
            f"--wafers {problem.wafers} are more than {problem.model.name} can use: it has {problem.count} layers, and "
            f"{spare} more can hold embedding and head"
        )
    reason = None
    for name in names:
        try:
            plans += [_held(evaluate(problem, proposal, name)) for proposal in strategy(name)(problem)]
        except UserError as error:
            refused[name], reason = str(error), reason or error
    if not plans:
        raise reason or UserError(f"{strategies} proposes nothing")
    least = min(plans, key=lambda p: (p.cores != problem.cores, p.devices, -p.requests, -p.speed.total))
    return Result(problem, tuple(plans), refused, plans[0] if target else least)


def _held(plan: Plan) -> Plan:
    """The plan, if it holds the requests; a strategy of the user's own may propose one that does not."""
    least = plan.problem.least
    room = plan.problem.external_room
    if plan.requests < least or any(wafer.free < 0 or wafer.external > room for wafer in plan.wafers):
        wafers, context = plan.partition.wafers, plan.problem.context
        raise UserError(
            f"{plan.strategy} puts more on wafer {plan.capacity.wafer} of {wafers} than it holds with {least} requests "
            f"of {context} tokens"
        )
    return plan


def with_figures(device: Description, figures: tuple[str, ...]) -> Description:
    """The description with figures set by hand, such as "hop_s=28e-6", "flops.bf16=1e15" or "overhead=5"."""
    for text in figures:
        name, _, value = text.partition("=")
        try:
            number = float(value)
        except ValueError:
            raise UserError(f"--set {text!r} should be NAME=NUMBER, such as hop_s=28e-6") from None
        part = "constants" if name in Constants.__struct_fields__ else "hardware"
        fields = msgspec.to_builtins(getattr(device, part))
        *outer, inner = name.split(".")
        place = fields
        for key in outer:
            place = place.get(key) or {}
        if not isinstance(place.get(inner, 0.0), int | float | None) or (not outer and inner not in fields):
            raise UserError(f"there is no figure {name!r}; there are {', '.join(_figures(device))}")
        place[inner] = int(number) if number.is_integer() else number
        try:
            made = msgspec.convert(fields, type(getattr(device, part)))
        except msgspec.ValidationError as error:
            raise UserError(f"--set {text}: {str(error).partition(' - at ')[0]}") from None
        device = msgspec.structs.replace(device, **{part: made}, sources=device.sources | {name: "set by hand"})
    return device


def _figures(device: Description) -> list[str]:
    """The names that `with_figures` takes; what holds several figures by those of its parts."""
    names = []
    for part in (device.hardware, device.constants):
        for name, value in msgspec.to_builtins(part).items():
            if isinstance(value, dict):
                names += [f"{name}.{inner}" for inner in value]
            elif not isinstance(value, str) and (name, value) != ("fabric", None):
                names.append(name)
    return names


def measured() -> Description:
    """This machine's first device, with its rates measured now (`roofline.ceiling`)."""
    one = make_mesh(MeshShape(1, 1))
    kind = one.devices.flat[0].device_kind
    today = datetime.date.today().isoformat()
    hop = tick_latency(one, sums=0, shape=(1, 1024))
    read = read_ceiling(one)
    hardware = Hardware(
        name=THIS_MACHINE,
        kind="cpu" if kind == "cpu" else one.devices.flat[0].platform,
        memory_bytes=float(device_memory(one)),
        memory_bytes_per_s=read,
        flops={"bf16": compute_ceiling(one, jnp.bfloat16), "f32": compute_ceiling(one, jnp.float32)},
        hop_s=hop,
        hop_bytes_per_s=read,
        core_bytes_per_s=read,
        domain=1,
    )
    text = f"measured on {kind} on {today}"
    names = ("memory_bytes", "memory_bytes_per_s", "flops.bf16", "flops.f32", "hop_s", "hop_bytes_per_s",
             "core_bytes_per_s", "domain")  # fmt: skip
    return Description(
        hardware=hardware,
        sources=dict.fromkeys(names, text),
        constants=Constants(basis="none: rates as measured", date=today),
    )
