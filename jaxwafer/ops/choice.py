"""The choice among an operation's backends: in order, the first that has no objection to the inputs.

A backend is a module with `objection(dtype, weight_format, platform) -> str | None` and `description() -> str`.
"""

from types import ModuleType

import jax.numpy as jnp

from jaxwafer.quant.formats import FORMATS


def explain(backends: dict[str, ModuleType], dtype, weight_format: str, platform: str) -> tuple[str, str]:
    """The backend taken, and why: what it is, or what kept the ones before it from being taken."""
    objections = []
    for name, module in backends.items():
        objection = module.objection(dtype, weight_format, platform)
        if objection is None:
            return name, "; ".join(objections) or module.description()
        objections.append(objection)
    raise AssertionError("the reference objects to nothing")


def implementation(backends: dict[str, ModuleType], platform: str) -> dict[str, str]:
    """{"backend", "reason"} on a platform for float32 activations; with every format named where they differ."""
    taken: dict[tuple[str, str], list[str]] = {}
    for form in FORMATS:
        backend, reason = explain(backends, jnp.float32, form, platform)
        taken.setdefault((backend, reason.replace(f" {form} ", " these ")), []).append(form)
    if len({backend for backend, _ in taken}) == 1:
        ((backend, _), *_) = taken
        return {"backend": backend, "reason": "; ".join(reason for _, reason in taken)}
    return {
        "backend": ", ".join(f"{backend} ({' '.join(forms)})" for (backend, _), forms in taken.items()),
        "reason": "; ".join(f"{backend}: {reason}" for backend, reason in taken),
    }
