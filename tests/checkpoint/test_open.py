"""What a user may call a model, and the cards that come with jaxwafer."""

import json

import numpy as np
import pytest
import safetensors.numpy

from jaxwafer import data_dir
from jaxwafer.checkpoint import cards
from jaxwafer.checkpoint.gguf import GGUFCheckpoint
from jaxwafer.checkpoint.hub import HubCheckpoint
from jaxwafer.checkpoint.open import open_checkpoint, open_config
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config

from .conftest import SPECIAL, one_line

INSTRUCT = "smollm2-135m-instruct"


@pytest.fixture
def bundled(tmp_path, monkeypatch):
    """A card folder of a test's own, with one checkpoint in the hub's layout, "little"."""
    folder = tmp_path / "checkpoints"
    (folder / "little").mkdir(parents=True)
    (folder / "little" / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    safetensors.numpy.save_file({"x": np.float32([1, 2])}, folder / "little" / "model.safetensors")
    monkeypatch.setattr(cards, "cards_folder", lambda: folder)
    return folder


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("smollm2-135m", 134_515_008),
        (INSTRUCT, 134_515_008),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.1-405b", 405_853_388_800),
    ],
)
def test_every_card_has_a_config_of_the_published_size(name, parameters):
    assert name in cards.card_names()
    assert spec_from_config(open_config(name)).parameters == parameters


def test_every_card_can_be_read():
    for name in cards.card_names():
        found = cards.card(name)
        assert found.name == name and isinstance(json.loads(found.config_path.read_text()), dict)
        if found.source is not None:
            assert len(bytes.fromhex(found.source.sha256)) == 32 and found.license and found.description


def test_a_gguf_file(write_gguf):
    path, _ = write_gguf("Q4_1")
    checkpoint = open_checkpoint(str(path))
    assert isinstance(checkpoint, GGUFCheckpoint) and checkpoint.path == path
    assert checkpoint.tokenizer().encode(SPECIAL[1]) == [1]
    assert open_config(path) == checkpoint.config


def test_a_folder(bundled):
    folder = bundled / "little"
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, HubCheckpoint) and list(checkpoint.names()) == ["x"]
    assert open_config(folder) == open_config(folder / "config.json") == checkpoint.config
    with pytest.raises(UserError, match=r"has no tokenizer\.json"):
        checkpoint.tokenizer()


def test_a_checkpoint_that_comes_with_jaxwafer(bundled):
    assert cards.card_names() == ["little"]
    np.testing.assert_array_equal(open_checkpoint("little").read("x").values, [1, 2])
    assert open_config("little") == {"architectures": ["LlamaForCausalLM"]}


def test_a_card_before_and_after_it_is_fetched(tmp_path, monkeypatch, smollm2):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError) as error:
        open_checkpoint(INSTRUCT)
    assert f"jaxwafer fetch {INSTRUCT}" in one_line(error)
    path = cards.card(INSTRUCT).weights_path
    assert path.is_relative_to(tmp_path / "jaxwafer" / "models" / INSTRUCT)
    path.parent.mkdir(parents=True)
    path.write_bytes(smollm2.read_bytes()[:1000])
    with pytest.raises(UserError, match="jaxwafer fetch"):
        open_checkpoint(INSTRUCT)
    path.unlink()
    path.symlink_to(smollm2)
    assert open_checkpoint(INSTRUCT).path == path


def test_a_card_without_weights_says_so():
    with pytest.raises(UserError) as error:
        open_checkpoint("llama-3.1-8b")
    assert "no weights" in one_line(error)


def test_an_unknown_name_lists_the_cards():
    for ask in (open_checkpoint, open_config):
        with pytest.raises(UserError) as error:
            ask("llama-9")
        assert all(name in one_line(error) for name in cards.card_names())


def test_paths_that_lead_nowhere(tmp_path):
    (tmp_path / "notes.txt").write_text("no model")
    for ask in (open_checkpoint, open_config):
        for path, says in ((tmp_path / "x", "there is no"), (tmp_path / "x.gguf", "there is no"),
                           (tmp_path, "config.json"), (tmp_path / "notes.txt", "notes.txt")):  # fmt: skip
            with pytest.raises(UserError) as error:
                ask(path)
            assert says in one_line(error)


def test_a_card_that_is_not_one(bundled):
    for text, says in (("config = 3", "config"), ("config = 'a'\nbytes = 1", "bytes"), ("[", "model card")):
        (bundled / "broken.toml").write_text(text)
        with pytest.raises(UserError) as error:
            open_checkpoint("broken")
        assert says in one_line(error) and "broken.toml" in str(error.value)


def test_where_models_are_kept(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cards.models_folder() == tmp_path / ".cache" / "jaxwafer" / "models"


def test_an_installation_without_cards_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(data_dir.jaxwafer, "__file__", str(tmp_path / "lib" / "jaxwafer" / "__init__.py"))
    monkeypatch.setattr(data_dir.sysconfig, "get_path", lambda name: str(tmp_path / "prefix"))
    with pytest.raises(UserError, match="share/jaxwafer/checkpoints; install jaxwafer"):
        cards.card_names()
    installed = tmp_path / "prefix" / "share" / "jaxwafer" / "checkpoints"
    installed.mkdir(parents=True)
    (installed / "a.json").write_text("{}")
    assert cards.card_names() == ["a"]
