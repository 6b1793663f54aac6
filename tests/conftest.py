"""Every test runs on 16 virtual CPU devices, with implicit promotion of dtypes and ranks made an error."""

import os
import signal

# Most of a test is compiling, and twice as fast where XLA does not optimise. `.ci/run` has a second run where it does.
import jaxlib.version

flags = "--xla_backend_optimization_level=0"
if jaxlib.version.__version_info__ < (0, 12):
    # Later ones have no such flag, and end the process over it.
    flags += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", flags)

import jax  # noqa: E402
import pytest  # noqa: E402

from jaxwafer.cache_dir import cache_folder  # noqa: E402

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 16)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_compilation_cache_dir", str(cache_folder("xla")))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


# A shell's background job begins with Ctrl-C ignored, and so would every program that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Whole models compiled in many variants: left out of the short run on the second Python.
SLOW = ("tests/parity/", "tests/laws/test_k3", "tests/laws/test_latent", "tests/laws/test_moe",
        "tests/laws/test_gpt_oss", "tests/laws/test_state", "tests/checkpoint/test_packed_decode",
        "tests/laws/test_laws.py::test_law_1_holds", "tests/laws/test_tiny", "tests/train/", "tests/scripts/",
        "tests/ops/test_sanitizers", "tests/pipeline/test_stream", "tests/test_distributed")  # fmt: skip


def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.startswith(SLOW):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: not item.nodeid.startswith(SLOW))
