"""Pipelined decoding of large language models on a JAX mesh of wafers and cores.

>>> engine = jaxwafer.load("smollm2-135m-instruct", mesh="2x1", weights="native")  # doctest: +SKIP
>>> for event in engine.generate(["Why is the sky blue?"], jaxwafer.Sampling(max_new_tokens=40), chat=True):
...     print(event.text, end="", flush=True)  # doctest: +SKIP
"""

from jaxwafer.engine import Engine, Event, Options, load
from jaxwafer.errors import UserError
from jaxwafer.pipeline.queue import Request, Sampling

__version__ = "0.1.0"
__all__ = ["Engine", "Event", "Options", "Request", "Sampling", "UserError", "load"]
