"""The TPU's lookup of rows, interpreted, against a gather."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.lookup import api, reference, tpu
from jaxwafer.quant import convert
from jaxwafer.quant.formats import FORMATS


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if not tpu.objection(None, form, "tpu")])
def test_rows_are_those_of_the_table(name):
    """Of a table that ends within a tile."""
    table = convert.quantize(np.random.default_rng(0).normal(size=(70, 96)).astype(np.float32), FORMATS[name])
    table = jax.tree.map(jnp.asarray, table)
    index = jnp.asarray([[0, 69, 31], [32, 31, 64]], jnp.int32)
    with pltpu.force_tpu_interpret_mode():
        got = tpu.lookup(table, index)
    want = reference.lookup(table, index)
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_the_choice():
    assert api.choose(FORMATS["int8"], "tpu") == "tpu"
    assert api.choose(FORMATS["bf16"], "tpu") == api.choose(FORMATS["int8"], "cpu") == "reference"
