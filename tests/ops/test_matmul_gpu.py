"""The GPU's matmul, interpreted, against the reference; and that it lowers for CUDA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.ops.matmul import gpu, reference
from jaxwafer.quant import convert
from jaxwafer.quant.formats import FORMATS

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
        error = np.abs(
            gpu.matmul(x, weight, jnp.int32(1), False, interpret=True)
            - reference.matmul(x, weight, jnp.int32(1), False)
        )
        matrix = np.abs(convert.dequantize(jax.tree.map(np.asarray, weight))[1][:, :330])
        assert (error <= 2e-6 * (np.abs(x) @ matrix.T) + 1e-30).all()


@pytest.mark.parametrize("name", ["int4", "int4-min", "mxfp4", "fp8"])
def test_it_lowers_for_cuda(name):
    """As far as can be seen without a GPU: the kernel is in the module, as Triton's."""
    inputs = jnp.zeros((1, 256), jnp.bfloat16), weights(name, (2, 64, 256)), jnp.int32(0), False
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    lower = jax.export.export(jax.jit(gpu.matmul, static_argnums=3), platforms=["cuda"], disabled_checks=unchecked)
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="gpu")
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("core",), abstract_device=device)):
        text = lower(*inputs).mlir_module()
    assert "stablehlo.custom_call @__gpu$xla.gpu.triton" in text


def test_what_is_not_quantised_is_left_to_the_reference():
    assert set(FORMATS) - set(NAMES) == {"f32", "f16", "bf16"}
