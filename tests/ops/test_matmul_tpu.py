"""The TPU's matmul, interpreted, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.matmul import reference, tpu
from jaxwafer.quant import convert
from jaxwafer.quant.formats import FORMATS
from jaxwafer.quant.storage import held_as

NAMES = [name for name, form in FORMATS.items() if tpu.objection(jnp.float32, form, "tpu") is None]


@pytest.fixture(autouse=True)
def interpreted():
    with pltpu.force_tpu_interpret_mode():
        yield


@pytest.mark.parametrize("shape", [(7, 45), pytest.param((300, 2200), marks=pytest.mark.slow)], ids=str)
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


def test_scales_may_be_the_bits_of_theirs():
    """As a TPU's memory holds them."""
    for name in ("int4", "int4-min", "mxfp4"):
        weight = convert.quantize(np.random.default_rng(0).normal(size=(2, 7, 64)).astype(np.float32), FORMATS[name])
        held = {n: part.view(held_as(n, part.dtype, "tpu")) for n, part in weight.parts.items()}
        assert {part.dtype.name for n, part in held.items() if n != "values"} <= {"uint8", "uint16"}
        x, layer = jnp.ones((3, 64), jnp.float32), jnp.int32(1)
        plain, bits = (jax.tree.map(jnp.asarray, w) for w in (weight, weight.replace(**held)))
        for backend in (tpu, reference):
            assert (backend.matmul(x, plain, layer, False) == backend.matmul(x, bits, layer, False)).all()


def test_the_rest_is_left_to_the_reference():
    assert set(FORMATS) - set(NAMES) == {"f16"}
    assert tpu.objection(jnp.float32, FORMATS["int4"], "cpu") == "not made for cpu"
