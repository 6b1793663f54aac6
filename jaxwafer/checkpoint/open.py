"""From what a user calls a model (a card's name, a folder, a file) to its checkpoint or its config."""

import os
from pathlib import Path

from jaxwafer.checkpoint.cards import card, card_names
from jaxwafer.checkpoint.gguf import GGUFCheckpoint
from jaxwafer.checkpoint.hub import INDEX, SINGLE, HubCheckpoint, read_config
from jaxwafer.checkpoint.load import formats_for, planned_formats
from jaxwafer.checkpoint.quantization import Quantization
from jaxwafer.checkpoint.source import Checkpoint
from jaxwafer.errors import UserError
from jaxwafer.partition.placement import Formats


def open_checkpoint(model: str | Path) -> Checkpoint:
    """The checkpoint that `model` names: a card of `checkpoints/`, a Hugging Face folder, or a .gguf file.

    An unknown name, a card whose weights have not been fetched and one without weights are UserErrors that say so.
    """
    path = _path(model)
    if path is None:
        found = card(str(model))
        path = found.weights_path
        if path is None:
            raise UserError(f"{model} is a config only: it can be planned but not run, as there are no weights of it")
        if not found.ready:
            raise UserError(f"the weights of {model} are not on this machine; run: jaxwafer fetch {model}")
    if path.is_dir():
        return HubCheckpoint(path)
    if path.suffix != ".gguf":
        raise UserError(f"{path} is neither a folder nor a .gguf file; give the folder that holds config.json")
    return GGUFCheckpoint(path)


def has_weights(model: str | Path) -> bool:
    """Whether there is a file to read weights from, good or bad, and not only a config."""
    path = _path(model)
    if path is None:
        found = card(str(model))
        path = found.weights_path if found.ready else None
    if path is not None and path.is_dir():
        return any((path / name).exists() for name in (SINGLE, INDEX))
    return path is not None and path.suffix == ".gguf"


def open_config(model: str | Path) -> dict:
    """The fields of a model's config.json, without its weights: a card, a folder, a .json file or a .gguf file."""
    return _config(model)[0]


def open_formats(model: str | Path, native: str, policy: str) -> Formats:
    """The format of each tensor under a weight policy: from the checkpoint where there is one, otherwise as the config
    says. native: `ModelSpec.native`."""
    if has_weights(model):
        return formats_for(open_checkpoint(model), policy)
    return planned_formats(_config(model)[1], native, policy)


def _config(model: str | Path) -> tuple[dict, Quantization | None]:
    path = _path(model)
    if path is None:
        path = card(str(model)).config_path
    gguf = path.suffix == ".gguf" and path.is_file()
    return (GGUFCheckpoint(path).config, None) if gguf else read_config(path)


def _path(model: str | Path) -> Path | None:
    """The path that `model` is, or None where it is the name of a card (or of nothing)."""
    name = str(model)
    path = Path(name).expanduser()
    if name in card_names():
        return None
    if path.exists():
        return path
    if os.sep in name or path.suffix in (".gguf", ".json"):
        raise UserError(f"there is no {path}; give a folder, a .gguf file or one of: {', '.join(card_names())}")
    return None
