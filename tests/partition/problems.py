"""Small made-up problems for the planner's tests."""

import msgspec

from jaxwafer.hardware import Constants, Description, Hardware
from jaxwafer.partition.needs import Layer, Model
from jaxwafer.partition.problem import Problem

HARDWARE = Hardware(
    name="toy", kind="gpu", memory_bytes=100.0, memory_bytes_per_s=1e3, flops={"bf16": 1e4}, hop_s=0.01,
    hop_bytes_per_s=1e4, core_bytes_per_s=1e4, domain=4,
)  # fmt: skip
NONE = Constants(basis="none", date="2026-01-01")


def layer(weights: int, token: int = 0, state: int = 0, kind: str = "") -> Layer:
    kind = kind or ("linear" if state else "full")
    return Layer(kind=kind, weights=weights, token=token, state=state, active=weights)


def problem(layers, *, hidden: int = 0, constants: Constants = NONE, hardware: dict | None = None, **fields) -> Problem:
    """A problem on a device of 100 bytes; the model's own fields are taken from `fields`."""
    model = {n: fields.pop(n) for n in ("embedding", "head", "head_read", "max_context") if n in fields}
    return Problem(
        model=Model(name="toy", layers=tuple(layers), hidden=hidden, **model),
        device=Description(
            hardware=msgspec.structs.replace(HARDWARE, **(hardware or {})), sources={}, constants=constants
        ),
        **({"context": 1} | fields),
    )
