"""The TPU's and the GPU's matmul of experts, interpreted, against the reference; and that the GPU's lowers for CUDA."""

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.model.mlp import Activation
from jaxwafer.ops.expert_matmul import gpu, reference, tpu
from jaxwafer.ops.gpu_kernel import KERNEL
from jaxwafer.quant import convert
from jaxwafer.quant.formats import FORMATS

from .kernels import interpreted, lowered_for_cuda

NAMES = [name for name, form in FORMATS.items() if tpu.objection(jnp.float32, form, "tpu") is None]
HELD = 5


@pytest.fixture(params=["tpu", "gpu"])
def kernel(request):
    with interpreted(request.param):
        yield {"tpu": tpu, "gpu": gpu}[request.param]


def check(kernel, name: str, experts: list[int], shape=(7, 45)) -> None:
    rng = np.random.default_rng(0)
    weight = convert.quantize(rng.normal(size=(2, HELD, *shape)).astype(np.float32), FORMATS[name])
    weight = jax.tree.map(jnp.asarray, weight)
    x = jnp.asarray(rng.normal(size=(len(experts), shape[1])), jnp.float32)
    experts = jnp.asarray(experts, jnp.int32)
    got, want = (b.expert_matmul(x, weight, jnp.int32(1), experts, HELD, False) for b in (kernel, reference))
    np.testing.assert_allclose(got, want, atol=2e-4 if "min" in name else 5e-5)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_agrees_with_the_reference(kernel, name):
    if kernel is tpu and name not in NAMES:
        pytest.skip("no kernel for it")
    check(kernel, name, [3, 1, -1, 3, 0, HELD])


@pytest.mark.parametrize(
    "experts",
    [[2], [-1], [-1, HELD, 99], [4] * 9, [0, 1, 2, 3, 4], [4, 3, 2, 1, 0, -1, 0, 4]],
    ids=["one", "none of one", "none", "all the same", "each", "mixed"],
)
def test_any_choice_of_experts(kernel, experts):
    check(kernel, "int4", experts)


def test_tiles_that_experts_share_and_experts_of_many_tiles(kernel):
    """Three tiles of rows: an expert that ends within one, one over two of them, and rows of no expert at the end."""
    rng = np.random.default_rng(1)
    experts = np.repeat([0, 2, 4, HELD], [100, 150, 30, 50])
    rng.shuffle(experts)
    check(kernel, "int4", experts.tolist(), (300, 64))


@pytest.mark.parametrize("most", [3, 2])
def test_chosen_matrices_are_copied_where_triton_cannot_address_all(monkeypatch, most):
    """Where it cannot address even those, the reference runs."""
    monkeypatch.setattr(gpu, "reachable", lambda shape, dtype: len(shape) <= most)
    monkeypatch.setattr(reference, "expert_matmul", mock.Mock(wraps=reference.expert_matmul))
    with interpreted("gpu"):
        check(gpu, "int4", [4, 1, -1, 4, HELD])
        check(gpu, "int4", [4, 3, 2, 1, 0, -1, 0, 4])
    assert reference.expert_matmul.call_count == 2 + 2 * (most < 3)


def test_experts_that_no_row_names_do_not_matter(kernel):
    """Nothing of them reaches the result, though they are not numbers."""
    stack = np.random.default_rng(2).normal(size=(2, HELD, 7, 40)).astype(np.float32)
    stack[:, [0, 2]] = np.nan
    weight = jax.tree.map(jnp.asarray, convert.quantize(stack, FORMATS["f32"]))
    experts = jnp.asarray([3, -1, 1, 4, 9], jnp.int32)
    got = np.asarray(kernel.expert_matmul(jnp.ones((5, 40), jnp.float32), weight, jnp.int32(1), experts, HELD, False))
    np.testing.assert_allclose(got[[0, 2, 3]], stack[1, [3, 1, 4]].sum(-1), atol=2e-5)
    assert not got[[1, 4]].any()


def test_formats_that_the_kernel_lacks_are_left_to_the_reference():
    assert set(FORMATS) - set(NAMES) == {"f16"}
    assert tpu.objection(jnp.float32, FORMATS["int4"], "cpu") == "not made for cpu"


@pytest.mark.parametrize("form", ["int4", "bf16"])
def test_joined_products_share_rows_of_x(form):
    """Three experts of each of two rows, one of them another core's: to the bit what each product is alone."""
    rng = np.random.default_rng(3)
    gate, up = (
        jax.tree.map(jnp.asarray, convert.quantize(rng.normal(size=(2, HELD, 7, 40)).astype(np.float32), FORMATS[form]))
        for _ in range(2)
    )
    x, experts = jnp.asarray(rng.normal(size=(2, 40)), jnp.bfloat16), jnp.asarray([4, 0, -1, 2, 4, 1], jnp.int32)
    arguments = gate, up, jnp.int32(1), experts, Activation(name="silu"), HELD, False
    with interpreted("gpu"):
        got = gpu.gated(x, *arguments)
        apart = reference.gated(x, *arguments, product=gpu.expert_matmul)
    np.testing.assert_array_equal(got, apart)
    np.testing.assert_allclose(got, reference.gated(x, *arguments), atol=2e-5, rtol=1e-5)
    assert not np.asarray(got)[2].any()


@pytest.mark.parametrize("form", ["int4", "mxfp4", "fp8", "bf16"])
def test_the_gpus_lowers_for_cuda(form):
    weight = convert.quantize(np.zeros((2, HELD, 64, 256), np.float32), FORMATS[form])
    x, experts = jnp.zeros((2, 256), jnp.bfloat16), jnp.zeros((16,), jnp.int32)

    def products(x, weight, experts):
        joined = gpu.gated(x, weight, weight, jnp.int32(1), experts, Activation(name="silu"), HELD, False)
        return gpu.expert_matmul(jnp.repeat(x, 8, axis=0), weight, jnp.int32(1), experts, HELD, False), joined

    assert lowered_for_cuda(products, x, jax.tree.map(jnp.asarray, weight), experts).count(KERNEL) == 2


def test_visits_go_by_tile_and_expert():
    owner = jnp.asarray([0] * 3 + [2] * 6 + [3] * 2 + [5] * 4, jnp.int32)
    tiles, experts, begin, end = map(np.asarray, tpu._visits(owner, 5, 4, 4 + 5 - 1))
    assert tiles.tolist() == [0, 0, 1, 2, 2, 2, 2, 2]
    assert experts.tolist() == [0, 2, 2, 2, 3, 3, 3, 3]
    assert begin.tolist() == [0, 3, 3, 3, 9, 0, 0, 0]
    assert end.tolist() == [3, 9, 9, 9, 11, 0, 0, 0]
