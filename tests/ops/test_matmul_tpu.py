"""The TPU's matmul, interpreted, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.matmul import reference, tpu
from jaxwafer.quant import convert
from jaxwafer.quant.formats import FORMATS

NAMES = [name for name, form in FORMATS.items() if tpu.objection(jnp.float32, form, "tpu") is None]


@pytest.fixture(autouse=True)
def interpreted():
    with pltpu.force_tpu_interpret_mode():
        yield


@pytest.mark.parametrize("shape", [(7, 45), (300, 2200)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_format_agrees_with_the_reference(name, shape):
    """Less than a block and a slice, and more of both; x shorter than the padded weight."""
    rng = np.random.default_rng(0)
    weight = convert.quantize(rng.normal(size=(2, *shape)).astype(np.float32), FORMATS[name])
    weight = jax.tree.map(jnp.asarray, weight)
    for rows in (1, 5, 130):
        x = jnp.asarray(rng.normal(size=(rows, shape[1])), jnp.float32)
        want = reference.matmul(x, weight, jnp.int32(1), False)
        error = np.abs(tpu.matmul(x, weight, jnp.int32(1), False) - want)
        matrix = np.abs(convert.dequantize(jax.tree.map(np.asarray, weight))[1][:, : shape[1]])
        # A minimum is summed apart from what is above it.
        assert (error <= (8e-6 if "min" in name else 2e-6) * (np.abs(x) @ matrix.T) + 1e-30).all()


def test_formats_without_groups_are_left_to_the_reference():
    assert set(FORMATS) - set(NAMES) == {"f32", "f16", "bf16", "fp8", "int8"}
    assert tpu.objection(jnp.float32, FORMATS["int4"], "cpu") == "not made for cpu"
