"""The choice among an operation's backends: in order, the first that has no objection to the inputs.

A backend is a module with `objection(dtype, form, platform) -> str | None` and `description(form, quantise) -> str`;
those of operations without weights do without `form` and `quantise`.
"""

from types import ModuleType

import jax.numpy as jnp

from jaxwafer.quant.formats import FORMATS, Format


def first(backends: dict[str, ModuleType], dtype, platform: str) -> tuple[str, str]:
    """The backend taken by an operation without weights, and why."""
    return _first(backends, (dtype, platform), ())


def explain(backends: dict[str, ModuleType], dtype, form: Format, platform: str, quantise: bool) -> tuple[str, str]:
    """The backend taken, and why: what it is, or what kept the ones before it from being taken."""
    return _first(backends, (dtype, form, platform), (form, quantise))


def _first(backends: dict[str, ModuleType], inputs: tuple, described: tuple) -> tuple[str, str]:
    objections = []
    for name, module in backends.items():
        objection = module.objection(*inputs)
        if objection is None:
            # That another platform's backend is of another platform is worth saying only where nothing else is.
            telling = [o for o in objections if not o.startswith("not made for")] or objections[:1]
            return name, "; ".join(telling) if name == "reference" else module.description(*described)
        objections.append(objection)
    raise AssertionError("the reference objects to nothing")


def implementation(backends: dict[str, ModuleType], platform: str) -> dict[str, str]:
    """{"backend", "reason"} on a platform for float32 activations; with every format named where they differ."""
    taken: dict[tuple[str, str], list[str]] = {}
    for name, form in FORMATS.items():
        backend, reason = explain(backends, jnp.float32, form, platform, False)
        taken.setdefault((backend, reason.replace(f" {name} ", " these ")), []).append(name)
    if len({backend for backend, _ in taken}) == 1:
        ((backend, _), *_) = taken
        return {"backend": backend, "reason": "; ".join(reason for _, reason in taken)}
    return {
        "backend": ", ".join(f"{backend} ({' '.join(forms)})" for (backend, _), forms in taken.items()),
        "reason": "; ".join(f"{backend}: {reason}" for backend, reason in taken),
    }
