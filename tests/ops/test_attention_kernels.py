"""The TPU's and the GPU's attention, interpreted, against the reference; and that the GPU's lowers for CUDA."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.ops import gpu_kernel
from jaxwafer.ops.attention import gpu, reference, tpu
from jaxwafer.ops.gpu_kernel import KERNEL
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step

from . import test_attention, test_latent_attention
from .kernels import as_bits, interpreted, lowered_for_cuda

LENGTHS = [1, 31, 33, 70, 5]


@pytest.fixture(params=["tpu", "gpu"])
def kernel(request):
    with interpreted(request.param):
        yield {"tpu": tpu, "gpu": gpu}[request.param]


@pytest.mark.parametrize("form", ["f32", "bf16", "fp8"])
@pytest.mark.parametrize("window, sunk", [(None, False), (10, True), (40, False)])
def test_decoding_agrees_with_the_reference(kernel, form, window, sunk):
    """Around a block of 32, with a pad row last, rows of others that are not numbers, and every number format."""
    (q, k, v), step, _ = test_attention.case(LENGTHS, [1, 1, 1, 1, 0], columns=4, form=form)
    sinks = jnp.asarray(np.random.default_rng(0).normal(size=q.shape[2:4]), jnp.float32) if sunk else None
    given = {"scale": 0.3, "window": window, "sinks": sinks}
    layer = jnp.int32(test_attention.LAYER)
    wanted = reference.paged_attention(q, as_bits(k), as_bits(v), layer, step, **given)
    found = kernel.paged_attention(q, as_bits(k), as_bits(v), layer, step, **given)
    assert found.shape == q.shape and np.isfinite(wanted).all()
    np.testing.assert_allclose(found, wanted, atol=3e-6)


@pytest.mark.parametrize("form", ["f32", "bf16", "fp8"])
def test_parts_of_a_latent_softmax_agree_with_the_reference(kernel, form):
    q, runs, step, _ = test_latent_attention.case([1, 4, 9, 30], [1, 1, 1, 0], parts=2, form=form)
    for number, pages in enumerate(map(as_bits, runs)):
        given = {"rank": 7, "scale": 0.3, "first": jnp.int32(number * pages.blocks)}
        layer = jnp.int32(test_latent_attention.LAYER)
        wanted = reference.latent_attention(q, pages, layer, step, **given)
        found = kernel.latent_attention(q, pages, layer, step, **given)
        np.testing.assert_array_equal(np.isneginf(found[0]), np.isneginf(wanted[0]))
        for mine, other in zip(found, wanted, strict=True):
            np.testing.assert_allclose(mine, other, atol=3e-6)


def test_what_a_request_has_is_the_same_in_any_number_of_parts(monkeypatch):
    """Lengths that give parts of several tiles, of one, and of none, with a window that begins within a tile."""
    (q, k, v), step, _ = test_attention.case([300, 70, 17, 1], [1] * 4, columns=10)
    for window in (None, 100):
        found = []
        for programs, least in ((1, 4), (512, 1)):
            monkeypatch.setattr(gpu, "PROGRAMS", programs)
            monkeypatch.setattr(gpu, "LEAST", least)
            with interpreted("gpu"):
                given = {"scale": 0.3, "window": window, "sinks": None}
                found.append(gpu.paged_attention(q, k, v, jnp.int32(1), step, **given))
        np.testing.assert_allclose(*found, atol=1e-6)


@pytest.mark.parametrize("group", [1, 20])
def test_a_kv_head_of_more_queries_than_a_program_takes(group):
    (q, k, v), step, _ = test_attention.case([33, 5], [1, 1], columns=3)
    q = jnp.asarray(np.random.default_rng(0).normal(size=(*q.shape[:3], group, q.shape[4])), jnp.bfloat16)
    given = {"scale": 0.3, "window": None, "sinks": None}
    with interpreted("gpu"):
        found = gpu.paged_attention(q, k, v, jnp.int32(1), step, **given)
    np.testing.assert_allclose(found, reference.paged_attention(q, k, v, jnp.int32(1), step, **given), atol=2e-2)


@pytest.mark.parametrize("form", ["float16", "uint16", "uint8"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gpus_lowers_for_cuda(form, dtype):
    """Head dimensions that are no power of two, and those of latent attention."""

    def shape(*sizes: int, dtype=jnp.int32):
        return jax.ShapeDtypeStruct(sizes, dtype)

    def pages(heads: int, dim: int) -> Pages:
        sizes = 2, 64, 32, heads
        return Pages(shape(*sizes, dim, dtype=form), shape(*sizes, dtype=jnp.int8) if form == "uint8" else None)

    def attend(q, k, v, absorbed, latent, step):
        mixed = gpu.paged_attention(q, k, v, jnp.int32(0), step, scale=0.1, window=100, sinks=None)
        given = {"rank": 512, "scale": 0.1, "first": jnp.int32(0)}
        return mixed, gpu.latent_attention(absorbed, latent, jnp.int32(0), step, **given)

    step = Step(start=shape(2), count=shape(2), table=shape(2, 16), slot=shape(2))
    queries = shape(2, 1, 2, 6, 80, dtype=dtype), shape(2, 1, 24, 576, dtype=dtype)
    module = lowered_for_cuda(attend, queries[0], pages(2, 80), pages(2, 80), queries[1], pages(1, 576), step)
    assert module.count(KERNEL) == 2


def test_what_triton_cannot_address_is_known():
    sizes = {"uint8": [(1 << 31, True), ((1 << 31) + 1, False), (1 << 32, False), ((1 << 32) + 1, True)]}
    sizes["uint16"] = [(1 << 31, True), ((1 << 31) + 1, True)]
    for dtype, each in sizes.items():
        for size, good in each:
            assert gpu_kernel.reachable((size,), dtype) == good


@pytest.mark.parametrize("form", ["f32", "fp8"])
@pytest.mark.parametrize("most", [4, 3])
def test_a_layer_of_a_cache_is_copied_where_triton_cannot_address_all(monkeypatch, form, most):
    """Where it cannot address even that, the reference runs."""
    monkeypatch.setattr(gpu_kernel, "reachable", lambda shape, dtype: len(shape) <= most)
    monkeypatch.setattr(reference, "paged_attention", mock.Mock(wraps=reference.paged_attention))
    (q, k, v), step, rows = test_attention.case([33, 5], [1, 1], columns=3, form=form)
    with interpreted("gpu"):
        found = gpu.paged_attention(q, k, v, jnp.int32(1), step, scale=test_attention.SCALE, window=None, sinks=None)
    np.testing.assert_allclose(found, test_attention.expected(q, rows, [33, 5], [1, 1]), atol=3e-6)
    assert reference.paged_attention.called == (most < 4)
