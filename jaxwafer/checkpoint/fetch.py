"""Fetching the weights of a model card: pip brings the wheel, one file of it is checked and moved into place."""

import errno
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from jaxwafer.checkpoint.cards import Source, card
from jaxwafer.errors import UserError

CHUNK = 1 << 20
POLL_SECONDS = 0.2
Progress = Callable[[int, int], None]


def fetch(name: str, *, progress: Progress | None = None, verify: bool = False) -> Path:
    """The weights of card `name` in the user's cache, fetched unless a file of the right size is there; its path.

    progress: called with (bytes done, bytes in all), downloading and unpacking together. verify: hash a file that is
    already there, and fetch it again if it is wrong. The file appears complete or not at all. No such card, a card
    without weights, no pip, no network, a wrong hash or a full disk is a UserError.
    """
    found = card(name)
    path = found.weights_path
    if path is None:
        raise UserError(f"{name} is a config only: there are no weights of it to fetch")
    report = progress or (lambda done, total: None)
    try:
        if found.ready and not (verify and found.source and _sha256(path) != found.source.sha256):
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        # On the destination's file system, so that the last step is a rename; removed whatever happens.
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=".fetch-") as folder:
            wheel = _download(found.source, Path(folder), report)
            unpacked = _unpack(found.source, wheel, Path(folder) / "unpacked", report)
            os.replace(unpacked, path)
            _sync_folder(path.parent)
    except OSError as error:
        where = error.filename or path.parent
        need = (found.source.wheel_bytes + found.source.bytes) // 10**6
        hint = f"; fetching {name} takes {need} MB, free some" if error.errno == errno.ENOSPC else ""
        raise UserError(f"cannot fetch {name} into {where}: {error.strerror or error}{hint}") from None
    return path


def _pip(*arguments: str) -> list[str]:
    """A pip command line of this Python, so that the user's own pip configuration decides where packages come from."""
    return [sys.executable, "-m", "pip", *arguments]


def _download(source: Source, folder: Path, report: Progress) -> Path:
    requirement = f"{source.package}=={source.version}"
    options = ("--no-deps", "--only-binary=:all:", "--no-input", "--disable-pip-version-check", "--dest", str(folder))
    # pip's own temporary files belong on the same file system, and go with the folder.
    environment = {**os.environ, "TMPDIR": str(folder)}
    total = source.wheel_bytes + source.bytes
    with (
        open(folder / "pip.log", "w+", encoding="utf-8", errors="replace") as log,
        subprocess.Popen(
            _pip("download", *options, requirement), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        ) as process,
    ):
        try:
            while True:
                try:
                    status = process.wait(POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    report(min(_largest(folder), source.wheel_bytes), total)
        except BaseException:
            process.kill()
            raise
        if status:
            log.seek(0)
            raise UserError(f"pip could not download {requirement}: {_reason(log.read())}")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise UserError(f"pip downloaded {len(wheels)} wheels for {requirement} instead of one")
    return wheels[0]


def _largest(folder: Path) -> int:
    """Bytes of the largest file below `folder`: the wheel that pip is writing."""
    sizes = [0]
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(parent, name)).st_size)
            except FileNotFoundError:
                continue  # pip moved it between the listing and now
    return max(sizes)


def _reason(log: str) -> str:
    """The line of pip's output that says why it failed."""
    if "No module named pip" in log:
        return f"this Python has no pip; run: {sys.executable} -m ensurepip"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    reason = (errors or lines or ["it said nothing"])[0]
    unreachable = "from versions: none" in reason or any("connection" in line.lower() for line in lines)
    return f"{reason}; check the network connection and pip's configuration" if unreachable else reason


def _unpack(source: Source, wheel: Path, target: Path, report: Progress) -> Path:
    """Write the member to `target`, checking size and hash on the way."""
    total, digest, done = source.wheel_bytes + source.bytes, hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, open(target, "wb") as file:
            if source.member not in archive.namelist():
                raise UserError(f"{source.package} {source.version} does not contain {source.member}")
            with archive.open(source.member) as member:
                while chunk := member.read(CHUNK):
                    done += len(chunk)
                    if done > source.bytes:
                        raise UserError(f"{source.member} of {source.package} is larger than {source.bytes} bytes")
                    digest.update(chunk)
                    file.write(chunk)
                    report(source.wheel_bytes + done, total)
            file.flush()
            os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise UserError(f"the wheel of {source.package} is damaged ({error}); fetch it again") from None
    if done != source.bytes or digest.hexdigest() != source.sha256:
        raise UserError(
            f"{source.member} of {source.package} {source.version} has sha256 {digest.hexdigest()[:16]}… over {done} "
            f"bytes, not {source.sha256[:16]}… over {source.bytes}; nothing was kept"
        )
    return target


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync_folder(folder: Path) -> None:
    """Make the rename itself durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
