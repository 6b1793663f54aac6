"""The check of a GPU's numbers, on this CPU and with small sizes: what it compares agrees, and a wrong number shows."""

import importlib.util
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxwafer.quant.formats import FORMATS

PATH = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("gpu_check", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.TURNS = 1
    return module


@pytest.mark.parametrize("form", ["int4", "fp8", "bf16"])
def test_products_are_compared(script, form):
    assert form in FORMATS
    found = [script.matmul(form, "cpu", 3, size=64), *script.experts(form, "cpu", size=64)]
    assert [row["case"] for row in found] == [f"matmul {form}, 3 rows", f"experts {form}", f"gate and up {form}"]
    assert all(row["within"] and row["gbytes_per_s"] > 0 for row in found)


@pytest.mark.parametrize("kind", ["heads", "latent"])
@pytest.mark.parametrize("kv", ["f32", "bf16", "fp8"])
def test_attention_is_compared(script, kind, kv):
    found = script.attention(kind, kv, "cpu", 2, 50)
    assert found["within"] and found["case"] == f"attention by {kind}, {kv} KV, 2 of 50 tokens"


def test_what_is_wrong_is_outside(script):
    def run(backend, x):
        return x if backend == "reference" else x + 1e-3

    assert not script.compared("", "gpu", run, (jnp.ones(3),), 1e-4, 12)["within"]
    assert script.compared("", "gpu", run, (jnp.ones(3),), 1e-2, 12)["within"]
