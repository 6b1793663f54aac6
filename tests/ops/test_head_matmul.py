"""Products by heads: plain JAX against NumPy, the CPU's kernels and the TPU's, interpreted, against plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.head_matmul import api, cpu, reference, tpu
from jaxwafer.quant import convert
from jaxwafer.quant.formats import FORMATS

NAMES = [name for name, form in FORMATS.items() if tpu.objection(jnp.float32, form, "tpu") is None]
S, H, K = 2, 3, 40


def weight(name: str, rows: int):
    matrix = np.random.default_rng(0).normal(size=(S, H * rows, K)).astype(np.float32)
    return jax.tree.map(jnp.asarray, convert.quantize(matrix, FORMATS[name]))


def vectors(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), jnp.float32)


@pytest.mark.parametrize("name", ["f32", "int4", "fp8"])
def test_the_reference_is_each_heads_own_product(name):
    held = weight(name, 5)
    matrix = convert.dequantize(jax.tree.map(np.asarray, held))[1, :, :K].reshape(H, 5, K)
    x, latent = vectors(2, 4, H, 5), vectors(2, 4, H, K)
    got = api.absorb(x, held, 1, K, backend="reference"), api.expand(latent, held, 1, backend="reference")
    np.testing.assert_allclose(got[0], np.einsum("bthn,hnk->bthk", x, matrix), atol=2e-5)
    np.testing.assert_allclose(got[1], np.einsum("bthk,hnk->bthn", latent, matrix), atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_agree_with_the_reference(name):
    """One token, and more than a tile of them."""
    held = weight(name, 8)
    with pltpu.force_tpu_interpret_mode():
        for batch, tokens in ((1, 1), (2, 70)):
            x, latent = vectors(batch, tokens, H, 8), vectors(batch, tokens, H, K)
            # Mosaic's memory spaces are only known under jit.
            got, want = (jax.jit(b.absorb, static_argnums=3)(x, held, jnp.int32(1), K) for b in (tpu, reference))
            np.testing.assert_allclose(got, want, atol=5e-5)
            got, want = (jax.jit(b.expand)(latent, held, jnp.int32(1)) for b in (tpu, reference))
            np.testing.assert_allclose(got, want, atol=2e-4 if "min" in name else 5e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_native_kernels_agree_with_the_reference(name, dtype):
    """One token, a full tile of them and one more; a head of few rows, and inputs short of the weight's groups."""
    for batch, tokens, rows in ((1, 1, 5), (1, 5, 8), (2, 2, 33)):
        held = weight(name, rows)
        x, latent = vectors(batch, tokens, H, rows).astype(dtype), vectors(batch, tokens, H, K).astype(dtype)
        wide = [a.astype(jnp.float32) for a in (x, latent)]
        index = jnp.int32(1)
        np.testing.assert_allclose(
            cpu.absorb(x, held, index, K), reference.absorb(wide[0], held, index, K), rtol=1e-5, atol=5e-5
        )
        np.testing.assert_allclose(
            cpu.expand(latent, held, index), reference.expand(wide[1], held, index), rtol=1e-5, atol=5e-5
        )


def test_the_choice():
    def choose(name: str, rows: int, platform: str) -> str:
        return api.choose(jnp.float32, FORMATS[name], rows, platform)

    assert [choose("int4", 128, p) for p in ("tpu", "gpu", "cpu")] == ["tpu", "reference", "cpu"]
    assert choose("int4", 96, "tpu") == choose("f16", 128, "tpu") == "reference"
