"""Where what can be made again is kept between runs."""

import os
from pathlib import Path


def cache_folder(name: str) -> Path:
    """$XDG_CACHE_HOME/jaxwafer/NAME, or under ~/.cache; not created here."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "jaxwafer" / name
