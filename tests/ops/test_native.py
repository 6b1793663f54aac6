"""Building and caching of native kernels; what happens without a compiler or with a damaged cache."""

import os
import shutil
import stat
import subprocess
import sys
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxwafer.ops import native
from jaxwafer.ops.backends import implementations
from jaxwafer.ops.matmul import api
from jaxwafer.quant.formats import FORMATS

# Doubles its argument: builds in a fraction of the matmul's time.
SOURCE = """
#include "xla/ffi/api/ffi.h"
namespace ffi = xla::ffi;
static ffi::Error Twice(ffi::Buffer<ffi::F32> x, ffi::Result<ffi::Buffer<ffi::F32>> y) {
  for (size_t i = 0; i < x.element_count(); ++i) y->typed_data()[i] = 2 * x.typed_data()[i];
  return ffi::Error::Success();
}
XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxwaferTwice, Twice,
                              ffi::Ffi::Bind().Arg<ffi::Buffer<ffi::F32>>().Ret<ffi::Buffer<ffi::F32>>());
"""


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """An empty cache and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    native.kernel.cache_clear()
    yield tmp_path
    native.kernel.cache_clear()


@pytest.fixture
def source(fresh):
    try:
        native.find_compiler()
    except native.Unavailable as error:
        pytest.skip(str(error))
    path = fresh / "twice" / "cpu.cc"
    path.parent.mkdir()
    # XLA takes a name only once per process, so each test's kernel has its own.
    path.write_text(f"// {fresh}\n{SOURCE}")
    return path


def objects() -> list[Path]:
    return sorted(native.cache_directory().glob("*.so"))


def compiler_script(directory: Path, body: str) -> Path:
    """A stand-in for the compiler that states a version and then does as told."""
    path = directory / "compiler"
    path.write_text(f'#!/bin/sh\ncase "$1" in --version) echo "stand-in 1.0"; exit 0;; esac\n{body}\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def twice(kernel, values):
    call = jax.ffi.ffi_call(kernel.target, jax.ShapeDtypeStruct((len(values),), jnp.float32))
    return call(jnp.asarray(values, jnp.float32)).tolist()


def test_builds_once_runs_and_is_found_again(source, monkeypatch):
    kernel = native.kernel(source, "JaxwaferTwice")
    assert twice(kernel, [1.5, -2.0]) == [3.0, -4.0]
    (path,) = objects()
    assert [p.name for p in native.cache_directory().iterdir()] == [path.name]
    native.kernel.cache_clear()
    monkeypatch.setattr(native, "_build", lambda *_: pytest.fail("built again"))
    assert native.kernel(source, "JaxwaferTwice") == kernel


@pytest.mark.slow
@pytest.mark.parametrize("damage", [b"", b"not an object", None])
def test_a_damaged_object_is_built_again(source, damage):
    compiler, version = native.find_compiler()
    key = native.cache_key(source, compiler, version)
    path = native._build(source, compiler, key)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage is None else damage)
    assert twice(native.kernel(source, "JaxwaferTwice"), [4.0]) == [8.0]
    assert native.cache_directory() / f"{native._stem(key, whole)}.so" in objects()


def test_an_object_that_does_not_load_is_built_again(source):
    """The right digest, but not for this machine's loader."""
    key = native.cache_key(source, *native.find_compiler())
    native.cache_directory().mkdir(parents=True)
    content = b"\x7fELF and nothing else"
    (native.cache_directory() / f"{native._stem(key, content)}.so").write_bytes(content)
    assert twice(native.kernel(source, "JaxwaferTwice"), [4.0]) == [8.0]
    assert len(objects()) == 2


def test_key_follows_source_compiler_and_jaxlib(source, monkeypatch):
    key = native.cache_key(source, ["c++"], "1.0")
    assert native.cache_key(source, ["c++"], "1.0") == key
    assert native.cache_key(source, ["c++"], "2.0") != key
    assert native.cache_key(source, ["c++", "-mno-avx"], "1.0") != key
    monkeypatch.setattr("jaxlib.version.__version__", "0.0.0")
    assert native.cache_key(source, ["c++"], "1.0") != key
    monkeypatch.undo()
    (fresh := source.parent / "shared").mkdir()
    monkeypatch.setattr(native, "SHARED", fresh)
    assert native.cache_key(source, ["c++"], "1.0") != key
    monkeypatch.undo()
    (source.parent / "own.h").write_text("")
    with_header = native.cache_key(source, ["c++"], "1.0")
    source.write_text(SOURCE + "\n")
    assert len({key, with_header, native.cache_key(source, ["c++"], "1.0")}) == 3


@pytest.mark.slow
def test_several_builds_at_once(source):
    compiler, version = native.find_compiler()
    key = native.cache_key(source, compiler, version)
    got = []
    threads = [threading.Thread(target=lambda: got.append(native._load(source, compiler, key))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 3 and all(hasattr(library, "JaxwaferTwice") for library in got)
    assert all(native._stem(key, path.read_bytes()) == path.stem for path in objects())


def test_a_compiler_that_does_not_know_this_machine(source, fresh, monkeypatch):
    """The build is tried again without -march=native."""
    compiler = shutil.which(native.find_compiler()[0][0])
    body = f'for a in "$@"; do [ "$a" = -march=native ] && exit 1; done\nexec {compiler} "$@"'
    monkeypatch.setenv("CXX", str(compiler_script(fresh, body)))
    assert twice(native.kernel(source, "JaxwaferTwice"), [0.5]) == [1.0]


@pytest.mark.parametrize(
    "case, message",
    [
        ("none", "no C++ compiler found: install g++ or clang++, or name one in CXX"),
        ("named", "no C++ compiler found: CXX names 'absent-c++', which is not on PATH"),
        ("failing", "could not compile cpu.cc: cpu.cc:1: error: out of ideas"),
        ("silent", "cannot keep or load the kernel"),
        ("broken", "does not run: no such luck"),
    ],
)
def test_without_a_kernel_the_reference_runs_and_says_why(fresh, monkeypatch, case, message):
    monkeypatch.delenv("CXX", raising=False)
    if case == "none":
        monkeypatch.setenv("PATH", str(fresh))
    elif case == "named":
        monkeypatch.setenv("CXX", "absent-c++")
    elif case == "failing":
        script = compiler_script(fresh, 'echo "note: hm" >&2; echo "cpu.cc:1: error: out of ideas" >&2; exit 1')
        monkeypatch.setenv("CXX", str(script))
    elif case == "broken":
        script = compiler_script(fresh, "")
        script.write_text('#!/bin/sh\necho "no such luck" >&2; exit 1\n')
        monkeypatch.setenv("CXX", str(script))
    else:
        monkeypatch.setenv("CXX", str(compiler_script(fresh, "exit 0")))
    with pytest.warns(RuntimeWarning) as caught:
        choices = {api.choose(jnp.float32, [FORMATS[name]], "cpu") for name in ("int4", "fp8", "f32")}
        report = implementations("cpu")
    assert choices == {"reference"}
    kernels = "matmul", "expert_matmul", "products by head", "attention", "linear attention"
    for name in kernels:
        assert report[name]["backend"] == "reference" and message in report[name]["reason"]
    warned = [str(w.message) for w in caught if w.category is RuntimeWarning]
    assert len(warned) == len(kernels)
    assert all(message in text and "\n" not in text for text in warned)


def test_a_damaged_object_and_a_failing_compiler(source, fresh, monkeypatch):
    """What is in the cache is not loaded, nothing replaces it, and a warning says so once."""
    script = compiler_script(fresh, 'echo "error: disk of cheese" >&2; exit 1')
    monkeypatch.setenv("CXX", str(script))
    key = native.cache_key(source, *native.find_compiler())
    native.cache_directory().mkdir(parents=True)
    (native.cache_directory() / f"{native._stem(key, b'whole')}.so").write_bytes(b"half")
    with pytest.warns(RuntimeWarning, match="runs the slow reference: .* disk of cheese") as caught:
        assert "disk of cheese" in native.kernel(source, "JaxwaferTwice")
        assert "disk of cheese" in native.kernel(source, "JaxwaferTwice")
    assert len(caught) == 1


def test_a_cache_that_cannot_be_written(source, fresh, monkeypatch):
    blocked = fresh / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    with pytest.warns(RuntimeWarning, match="cannot keep or load the kernel in"):
        assert isinstance(native.kernel(source, "JaxwaferTwice"), str)


def test_importing_builds_nothing(tmp_path):
    code = "import jaxwafer.ops.backends, jaxwafer.ops.matmul.api, jaxwafer.ops.native"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CXX": "absent-c++"}
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []
