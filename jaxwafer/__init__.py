"""Pipelined decoding of large language models on a JAX mesh of wafers and cores.

>>> engine = jaxwafer.load("smollm2-135m-instruct", mesh="2x1", weights="native")  # doctest: +SKIP
>>> for event in engine.generate(["Why is the sky blue?"], jaxwafer.Sampling(max_new_tokens=40), chat=True):
...     print(event.text, end="", flush=True)  # doctest: +SKIP
"""

import importlib
import typing

from jaxwafer.errors import UserError

if typing.TYPE_CHECKING:
    from jaxwafer.engine import Engine, Event, load
    from jaxwafer.options import Options
    from jaxwafer.pipeline.queue import Request, Sampling
    from jaxwafer.planner import plan

__version__ = "0.1.0"
__all__ = ["Engine", "Event", "Options", "Request", "Sampling", "UserError", "load", "plan"]

# Imported when first asked for: JAX takes seconds, in which the command line must hear Ctrl-C.
_HOMES = dict.fromkeys(("Engine", "Event", "load"), "jaxwafer.engine")
_HOMES |= {"Options": "jaxwafer.options", "plan": "jaxwafer.planner"}
_HOMES |= dict.fromkeys(("Request", "Sampling"), "jaxwafer.pipeline.queue")


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
