"""Strategies: one file each, with one function, `propose(problem) -> list[Proposal]`.

A file of the user's own may be named in place of one of these. A strategy that does not apply raises a UserError.
"""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path

from jaxwafer.errors import UserError
from jaxwafer.partition.problem import Problem, Proposal

NAMES = ("uniform", "first_fit", "minmax", "kv_aware", "packed", "regions", "width")
Strategy = Callable[[Problem], list[Proposal]]


def strategy(name: str) -> Strategy:
    """One of `NAMES`, with - or _, or the `propose` of a Python file."""
    if name.replace("-", "_") in NAMES:
        return importlib.import_module(f"{__name__}.{name.replace('-', '_')}").propose
    path = Path(name)
    if path.suffix != ".py" or not path.is_file():
        names = ", ".join(n.replace("_", "-") for n in NAMES)
        raise UserError(f"there is no strategy {name!r}; give all, a Python file or one of: {names}")
    return _own(path)


def _own(path: Path) -> Strategy:
    module = importlib.util.module_from_spec(found := importlib.util.spec_from_file_location(path.stem, path))
    try:
        found.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be imported: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, "propose", None)):
        raise UserError(f"{path} has no function propose(problem) that returns a list of Proposals")

    def propose(problem: Problem) -> list[Proposal]:
        try:
            proposals = module.propose(problem)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{path}: propose failed: {type(error).__name__}: {error}") from error
        if not isinstance(proposals, list) or not all(isinstance(p, Proposal) for p in proposals):
            raise UserError(f"{path}: propose must return a list of jaxwafer.partition.problem.Proposal")
        return proposals

    return propose
