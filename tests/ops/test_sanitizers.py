"""The native kernels over odd shapes, built with the address and undefined-behaviour sanitizers."""

import subprocess
from pathlib import Path

import jax
import pytest

from jaxwafer.ops import native

FOLDER = Path(__file__).parent / "sanitized"
FLAGS = ("-std=c++17", "-O0", "-g1", "-Wall", "-Wextra", "-fsanitize=address,undefined", "-fno-sanitize-recover=all",
         "-march=native", "-pthread")  # fmt: skip


@pytest.mark.parametrize("name", ["product", "head_matmul", "attention", "linear_attention"])
def test_nothing_is_read_or_written_out_of_bounds(name, tmp_path):
    try:
        compiler, _ = native.find_compiler()
    except native.Unavailable as error:
        pytest.skip(str(error))
    program = tmp_path / name
    include = ["-isystem", jax.ffi.include_dir(), "-I", str(native.SHARED), "-I", str(FOLDER)]
    command = [*compiler, *FLAGS, *include, str(FOLDER / f"{name}.cc"), "-o", str(program)]
    built = subprocess.run(command, capture_output=True, text=True)
    if "sanitize" in built.stderr or "asan" in built.stderr:
        pytest.skip("the compiler has no sanitizers here")
    assert built.returncode == 0 and "warning" not in built.stderr, built.stderr
    done = subprocess.run([program], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
