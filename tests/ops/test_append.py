"""Rows written into the paged KV cache, by every backend; the TPU's is interpreted."""

from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.append import reference
from jaxwafer.ops.append.api import BACKENDS, append, choose
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step

from .kernels import as_bits
from .test_pages import DTYPES, host, pages, rows, whole

run = jax.jit(append, static_argnames="backend")


@pytest.fixture(params=BACKENDS)
def write(request):
    """The operation on caches kept as bits, by each backend."""

    def write(cache: Pages, *where) -> Pages:
        found = run(as_bits(cache), *where, backend=request.param)
        return found.replace(values=np.asarray(found.values).view(cache.values.dtype))

    with pltpu.force_tpu_interpret_mode() if request.param == "tpu" else nullcontext():
        yield write


@pytest.mark.parametrize("form", DTYPES)
def test_rows_are_written_and_no_other_is_touched(form, write):
    """Two requests of three tokens, from the end of a block into the next, and from the start of one."""
    cache, new = pages(form), rows(2, 3)
    layer, block, offset = whole(1, [[0, 4, 4], [1, 1, 1]], [[3, 0, 1], [0, 1, 2]])
    expected = host(cache)
    expected[1, np.asarray(block), np.asarray(offset)] = np.asarray(new)
    np.testing.assert_array_equal(host(write(cache, layer, block, offset, new)), expected)


@pytest.mark.parametrize("form", DTYPES)
def test_rows_outside_the_cache_are_dropped_and_neither_clamped_nor_wrapped_onto_a_live_one(form, write):
    cache = pages(form)
    count = cache.blocks
    new = rows(6, 1)
    layer, block, offset = whole(0, [[count], [-1], [-count], [2], [count + 7], [0]], [[0], [1], [2], [3], [3], [0]])
    expected = host(cache)
    expected[0, 2, 3], expected[0, 0, 0] = np.asarray(new)[3, 0], np.asarray(new)[5, 0]
    np.testing.assert_array_equal(host(write(cache, layer, block, offset, new)), expected)


@pytest.mark.parametrize("form", DTYPES)
@pytest.mark.slow
@pytest.mark.parametrize("heads, dim, block, tokens", [(3, 40, 32, 1), (1, 24, 16, 1), (3, 8, 16, 1), (2, 24, 16, 5),
                                                      (1, 40, 8, 30), (2, 8, 16, 16)])  # fmt: skip
def test_every_backend_writes_what_the_reference_writes(form, heads, dim, block, tokens, write):
    """Latent and split heads; first, last and middle offsets; pad rows, pad tokens, and blocks of another core."""
    rng, layers, columns = np.random.default_rng(tokens), 3, 5
    start = np.array([0, block - 1, block, 1, 2 * block - 1, 3, block + 1, 7, block - 2, 5, 0])
    count = np.where(np.arange(len(start)) % 4 == 2, 0, np.maximum(tokens - np.arange(len(start)) % 3, 1))
    table = rng.permutation(len(start) * columns).reshape(len(start), columns)
    shape = (layers, table.size - 9, block, heads, dim)
    values = jnp.asarray(rng.standard_normal(shape), jnp.float32).astype(DTYPES[form])
    exponent = jnp.asarray(rng.integers(-4, 5, shape[:-1]), jnp.int8) if form == "fp8" else None
    cache = Pages(values=values, exponent=exponent)
    step = Step(*(jnp.asarray(a, jnp.int32) for a in (start, count, table, start)))
    new = jnp.asarray(rng.standard_normal((len(start), tokens, heads, dim)), jnp.bfloat16)
    where = jnp.int32(1), *step.rows(tokens, block)
    found, wanted = as_bits(write(cache, *where, new)), reference.append(as_bits(cache), *where, new)
    for mine, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(mine, other)


def test_one_head_does_not_scale_another(write):
    cache = pages("fp8")
    new = np.ones((1, 1, cache.values.shape[3], cache.values.shape[4]), np.float32)
    new[0, 0, 1] = 1e6
    layer, block, offset = whole(0, [[0]], [[0]])
    got = host(write(cache, layer, block, offset, jnp.asarray(new)))[0, 0, 0]
    np.testing.assert_array_equal(got[[0, 2]], 1.0)
    np.testing.assert_allclose(got[1], 1e6, rtol=2**-4)


def test_a_donated_cache_is_updated_in_place():
    cache = jax.tree.map(lambda a: a + jnp.zeros((), a.dtype), pages("f32"))
    layer, block, offset = whole(0, [[1]], [[2]])
    donating = jax.jit(append, static_argnames="backend", donate_argnums=0)
    compiled = donating.lower(cache, layer, block, offset, rows(1, 1), backend=choose("cpu")).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == cache.values.nbytes
    assert memory.temp_size_in_bytes < cache.values.nbytes
    before = cache.values.unsafe_buffer_pointer()
    after = compiled(cache, layer, block, offset, rows(1, 1))
    assert cache.values.is_deleted() and after.values.unsafe_buffer_pointer() == before


def test_platforms_take_their_own():
    assert [choose(platform) for platform in ("cpu", "gpu", "tpu")] == ["reference", "reference", "tpu"]
