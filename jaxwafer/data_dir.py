"""Where the files that come with jaxwafer are."""

import sysconfig
from pathlib import Path

import jaxwafer
from jaxwafer.errors import UserError


def data_folder(name: str) -> Path:
    """`name` beside the package in a clone, or under share/jaxwafer of an installation."""
    installed = Path(sysconfig.get_path("data")) / "share" / "jaxwafer" / name
    for folder in (Path(jaxwafer.__file__).parents[1] / name, installed):
        if folder.is_dir():
            return folder
    raise UserError(f"there is no {installed}; install jaxwafer from a clone (pip install -e .)")
