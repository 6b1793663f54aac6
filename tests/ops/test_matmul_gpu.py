"""The GPU's matmul, interpreted, against the reference; and that it lowers for CUDA."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.ops import gpu_kernel
from jaxwafer.ops.gpu_kernel import KERNEL
from jaxwafer.ops.matmul import gpu, reference
from jaxwafer.quant import convert
from jaxwafer.quant.formats import FORMATS

from .kernels import interpreted, lowered_for_cuda

NAMES = [name for name, form in FORMATS.items() if gpu.objection(jnp.float32, form, "gpu") is None]


def weights(name: str, shape) -> object:
    matrix = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return jax.tree.map(jnp.asarray, convert.quantize(matrix, FORMATS[name]))


@pytest.mark.parametrize("name", NAMES)
def test_every_format_agrees_with_the_reference(name):
    """Sizes that no block and no chunk divides, and x shorter than the padded weight."""
    weight = weights(name, (2, 45, 330))
    for rows in (1, 17):
        x = jnp.asarray(np.random.default_rng(1).normal(size=(rows, 330)), jnp.float32)
        with interpreted("gpu"):
            found = gpu.matmul(x, weight, jnp.int32(1), False)
        error = np.abs(found - reference.matmul(x, weight, jnp.int32(1), False))
        matrix = np.abs(convert.dequantize(jax.tree.map(np.asarray, weight))[1][:, :330])
        assert (error <= 2e-6 * (np.abs(x) @ matrix.T) + 1e-30).all()


@pytest.mark.parametrize("name", ["int4", "int4-min", "mxfp4", "fp8"])
def test_it_lowers_for_cuda(name):
    """As far as can be seen without a GPU: the kernel is in the module, as Triton's."""

    def product(x, weight):
        return gpu.matmul(x, weight, jnp.int32(0), False)

    assert KERNEL in lowered_for_cuda(product, jnp.zeros((1, 256), jnp.bfloat16), weights(name, (2, 64, 256)))


@pytest.mark.parametrize("most", [2, 1])
def test_a_matrix_is_copied_where_triton_cannot_address_the_stack(monkeypatch, most):
    """Where it cannot address even that, the reference runs."""
    monkeypatch.setattr(gpu_kernel, "reachable", lambda shape, dtype: len(shape) <= most)
    monkeypatch.setattr(reference, "matmul", mock.Mock(wraps=reference.matmul))
    weight, x = weights("int4", (2, 45, 330)), jnp.ones((2, 330), jnp.float32)
    with interpreted("gpu"):
        found = gpu.matmul(x, weight, jnp.int32(1), False)
    assert reference.matmul.called == (most < 2)
    np.testing.assert_allclose(found, reference.matmul(x, weight, jnp.int32(1), False), rtol=1e-4, atol=1e-4)


def test_what_is_not_quantised_is_left_to_the_reference():
    assert set(FORMATS) - set(NAMES) == {"f32", "f16", "bf16"}
