"""The TPU's attention, interpreted, against the reference."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.attention import reference, tpu
from jaxwafer.ops.bits import stored_as
from jaxwafer.ops.pages import Pages

from . import test_attention, test_latent_attention

LENGTHS = [1, 31, 33, 70, 5]


@pytest.fixture(autouse=True)
def interpreted():
    with pltpu.force_tpu_interpret_mode():
        yield


def as_bits(pages: Pages) -> Pages:
    """The cache as the engine keeps it."""
    return pages.replace(values=pages.values.view(stored_as(pages.values.dtype)))


@pytest.mark.parametrize("form", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize("window, sunk", [(None, False), (10, True), (40, False)])
def test_decoding_agrees_with_the_reference(form, window, sunk):
    """Around a block of 32, with a pad row last, rows of others that are not numbers, and every number format."""
    (q, k, v), step, _ = test_attention.case(LENGTHS, [1, 1, 1, 1, 0], columns=4, form=form)
    sinks = jnp.asarray(np.random.default_rng(0).normal(size=q.shape[2:4]), jnp.float32) if sunk else None
    given = {"scale": 0.3, "window": window, "sinks": sinks}
    layer = jnp.int32(test_attention.LAYER)
    wanted = reference.paged_attention(q, as_bits(k), as_bits(v), layer, step, **given)
    found = tpu.paged_attention(q, as_bits(k), as_bits(v), layer, step, **given)
    assert found.shape == q.shape and np.isfinite(wanted).all()
    np.testing.assert_allclose(found, wanted, atol=3e-6)


@pytest.mark.parametrize("form", ["f32", "bf16", "fp8"])
def test_parts_of_a_latent_softmax_agree_with_the_reference(form):
    q, runs, step, _ = test_latent_attention.case([1, 4, 9, 30], [1, 1, 1, 0], parts=2, form=form)
    for number, pages in enumerate(map(as_bits, runs)):
        given = {"rank": 7, "scale": 0.3, "first": jnp.int32(number * pages.blocks)}
        layer = jnp.int32(test_latent_attention.LAYER)
        wanted = reference.latent_attention(q, pages, layer, step, **given)
        found = tpu.latent_attention(q, pages, layer, step, **given)
        np.testing.assert_array_equal(np.isneginf(found[0]), np.isneginf(wanted[0]))
        for mine, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, other, atol=3e-6)
