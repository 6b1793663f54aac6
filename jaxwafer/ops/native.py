"""C++ kernels for XLA on CPU: compiled at first use with the system's compiler, kept in a user cache.

A cached object's name holds a digest of all that went into it and one of its own bytes, so that stale, damaged and
half-written files are never loaded and several processes may build at once.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import jax
import jaxlib.version

from jaxwafer.cache_dir import cache_folder

COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-DNDEBUG", "-w", "-shared", "-fPIC")
# Tried in order: not every compiler knows the machine it runs on.
TARGETS = (("-march=native",), ())
# Headers that kernels share.
SHARED = Path(__file__).parent / "cpu"
_REGISTERED: list[str] = []


class Unavailable(Exception):
    """A kernel that cannot be built here; the message is the reason, for reports."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """A loaded kernel. target: the name it is registered under with XLA. built_with: the compiler, for reports."""

    target: str
    built_with: str


@functools.cache
def kernel(source: Path, symbol: str) -> Kernel | str:
    """The FFI handler `symbol` of a C++ file, built and registered with XLA on CPU; where that fails, the reason.

    A failure warns once and is remembered for the life of the process.
    """
    try:
        compiler, version = find_compiler()
        key = cache_key(source, compiler, version)
        library = _load(source, compiler, key)
    except Unavailable as error:
        warnings.warn(f"{source.parent.name} on CPU runs the slow reference: {error}", RuntimeWarning, stacklevel=2)
        return str(error)
    # The key is part of the name: an executable from XLA's own cache never calls a kernel it was not compiled for.
    target = f"jaxwafer_{source.parent.name}_{key[:16]}"
    jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(getattr(library, symbol)), platform="cpu")
    _REGISTERED.append(target)
    return Kernel(target=target, built_with=version)


def registered() -> tuple[str, ...]:
    """Targets of the kernels that this process has."""
    return tuple(_REGISTERED)


def find_compiler() -> tuple[list[str], str]:
    """The command of the C++ compiler (the environment's CXX, or the first on PATH) and the version it states."""
    named = shlex.split(os.environ.get("CXX", ""))
    command = named or next(([c] for c in COMPILERS if shutil.which(c)), None)
    if command is None:
        raise Unavailable("no C++ compiler found: install g++ or clang++, or name one in CXX")
    if shutil.which(command[0]) is None:
        raise Unavailable(f"no C++ compiler found: CXX names {command[0]!r}, which is not on PATH")
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace")
    if done.returncode:
        raise Unavailable(f"the C++ compiler {shlex.join(command)!r} does not run: {_first_line(done.stderr)}")
    return command, _first_line(done.stdout)


def cache_directory() -> Path:
    return cache_folder("kernels")


def cache_key(source: Path, compiler: list[str], version: str) -> str:
    """Digest of everything the object depends on; headers of ours stand beside the source or in `SHARED`."""
    texts = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")), *sorted(SHARED.glob("*.h")))]
    parts = (*texts, version, jaxlib.version.__version__, _processor(), repr((compiler, FLAGS, TARGETS)))
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _load(source: Path, compiler: list[str], key: str) -> ctypes.CDLL:
    """The cached library, or, where there is none that is whole and loads, one built now."""
    for path in cache_directory().glob(f"{key}-*.so"):
        try:
            if path.stem == _stem(key, path.read_bytes()):
                return ctypes.CDLL(str(path))
        except OSError:
            # Unreadable, taken away meanwhile, or not loadable: as if it were not there.
            continue
    try:
        return ctypes.CDLL(str(_build(source, compiler, key)))
    except OSError as error:
        raise Unavailable(f"cannot keep or load the kernel in {cache_directory()}: {error}") from error


def _build(source: Path, compiler: list[str], key: str) -> Path:
    cache_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_directory()) as scratch:
        out = Path(scratch) / "kernel.so"
        for target in TARGETS:
            include = ["-isystem", jax.ffi.include_dir(), "-I", str(SHARED)]
            arguments = [*FLAGS, *target, *include, str(source), "-o", str(out)]
            done = subprocess.run([*compiler, *arguments], capture_output=True, text=True, errors="replace")
            if done.returncode == 0:
                break
        else:
            said = next((line for line in done.stderr.splitlines() if "error" in line), _first_line(done.stderr))
            raise Unavailable(f"{shlex.join(compiler)} could not compile {source.name}: {said.strip()}")
        path = cache_directory() / f"{_stem(key, out.read_bytes())}.so"
        os.replace(out, path)
        return path


def _stem(key: str, content: bytes) -> str:
    return f"{key}-{hashlib.sha256(content).hexdigest()}"


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def _processor() -> str:
    """What -march=native may look at: model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "CPU part", "Features")
    return "\n".join(line for line in lines if line.startswith(wanted))
