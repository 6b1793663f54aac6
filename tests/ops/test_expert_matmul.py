"""Rows times the matrices of their experts, against a matrix at a time in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxwafer.model.mlp import Activation
from jaxwafer.ops import backends
from jaxwafer.ops.activation import activate
from jaxwafer.ops.expert_matmul import api, reference
from jaxwafer.ops.matmul import api as matmul
from jaxwafer.ops.operations import Operations
from jaxwafer.quant.convert import dequantize, quantize
from jaxwafer.quant.formats import FORMATS

S, E, N, K = 2, 5, 7, 40
# The TPU's and the GPU's are in test_expert_matmul_kernels.py.
HERE = ("cpu", "reference")
STACK = np.random.default_rng(0).standard_normal((S, E, N, K)).astype(np.float32)


@pytest.fixture(scope="module", autouse=True)
def native():
    if api.choose(jnp.float32, FORMATS["f32"], "cpu") != "cpu":
        pytest.skip(api.explain(jnp.float32, FORMATS["f32"], "cpu")[1])


@partial(jax.jit, static_argnames="backend")
def run(x, weight, index, experts, backend="reference"):
    return api.expert_matmul(x, weight, index, experts, of=E, backend=backend)


def check(experts, form="f32", index=1, seed=1, backend="reference"):
    weight = quantize(STACK, FORMATS[form])
    experts = np.asarray(experts, np.int32)
    x = np.random.default_rng(seed).standard_normal((len(experts), K)).astype(np.float32)
    expected = np.zeros((len(experts), N))
    for row, expert in enumerate(experts.tolist()):
        if 0 <= expert < E:
            expected[row] = dequantize(weight)[index, expert, :, :K].astype(np.float64) @ x[row]
    got = run(x, jax.tree.map(jnp.asarray, weight), index, experts, backend=backend)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(got), expected, atol=2e-5)


@pytest.mark.parametrize(
    "experts",
    [
        [3],
        [0, 1, 2, 3, 4],
        [4, 4, 4, 4, 4, 4],
        [2, 0, 2, 0, 2, 4, 0],
        [-1],
        [-1, -1, 5, 99],
        [-1, 3, 5, 3, -7, 0],
        [1] * 300 + [-1] * 20 + [0] * 3 + [4] * 129,
    ],
    ids=["one row", "a row each", "all to one", "empty experts", "a pad", "pads alone", "pads between", "many tiles"],
)
@pytest.mark.parametrize("backend", HERE)
def test_each_row_meets_the_matrix_of_its_expert(experts, backend):
    check(experts, backend=backend)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("index, backend", [(0, "reference"), (1, "reference"), (1, "cpu")])
def test_every_format(form, index, backend):
    check([2, 0, -1, 4, 0, 1], form=form, index=index, backend=backend)


@pytest.mark.parametrize("form", ["int4", "int8-g32", "mxfp4"])
def test_rows_in_int8_are_those_of_the_dense_product(form):
    """To the bit, however many rows an expert has."""
    weight = jax.tree.map(jnp.asarray, quantize(STACK, FORMATS[form]))
    experts = np.array([2] * 3 + [-1, 4] + [0] * 20 + [9], np.int32)
    x = jnp.asarray(np.random.default_rng(4).standard_normal((len(experts), K)), jnp.float32)
    got = api.expert_matmul(x, weight, 1, experts, of=E, backend="cpu", quantise=True)
    for expert in (0, 2, 4):
        mine = experts == expert
        dense = matmul.matmul(x[mine], weight[1], expert, backend="cpu", quantise=True)
        np.testing.assert_array_equal(got[mine], dense)
    assert not np.asarray(got)[experts != np.clip(experts, 0, 4)].any()


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.lists(st.integers(-2, E + 1), min_size=9, max_size=9), st.integers(0, 99))
def test_any_mixture_of_experts(experts, seed):
    for backend in HERE:
        check(experts, seed=seed, backend=backend)


def test_tiles_end_where_the_rows_of_an_expert_do(monkeypatch):
    monkeypatch.setattr(reference, "TILE", 2)
    x = np.random.default_rng(2).standard_normal((11, K)).astype(np.float32)
    experts = np.array([0, 3, 3, 0, 3, -1, 3, 3, 1, 1, 0], np.int32)
    weight = jax.tree.map(jnp.asarray, quantize(STACK, FORMATS["f32"]))
    got = jax.jit(partial(reference.expert_matmul, of=E, quantise=False))(x, weight, jnp.int32(0), experts)
    expected = np.where(experts[:, None] < 0, 0, np.einsum("rk,rnk->rn", x, STACK[0, experts]))
    np.testing.assert_allclose(np.asarray(got), expected, atol=2e-5)


@pytest.mark.parametrize("backend", HERE)
def test_experts_that_no_row_names_are_not_read(backend):
    """Nothing of them reaches the result, though they are not numbers."""
    stack = STACK.copy()
    stack[:, [0, 2]] = np.nan
    stack[0] = np.nan
    weight = jax.tree.map(jnp.asarray, quantize(stack, FORMATS["f32"]))
    experts = np.array([3, -1, 1, 4, 9], np.int32)
    got = np.asarray(run(np.ones((5, K), np.float32), weight, 1, experts, backend=backend))
    np.testing.assert_allclose(got[[0, 2, 3]], STACK[1, [3, 1, 4]].sum(-1), atol=2e-5)
    assert not got[[1, 4]].any()


def test_bfloat16_rows_accumulate_in_float32():
    weight = jax.tree.map(jnp.asarray, quantize(STACK, FORMATS["bf16"]))
    x = jnp.asarray(np.random.default_rng(3).standard_normal((4, K)), jnp.bfloat16)
    got = run(x, weight, 0, np.array([1, 1, 0, 4], np.int32))
    wide = np.asarray(x, np.float64)
    expected = np.einsum("rk,rnk->rn", wide, dequantize(quantize(STACK, FORMATS["bf16"]))[0, [1, 1, 0, 4]])
    np.testing.assert_allclose(np.asarray(got), expected, atol=2e-5)


def test_the_choice_is_shown():
    bf16, int4 = FORMATS["bf16"], FORMATS["int4"]
    assert api.choose(jnp.float32, int4, "tpu") == "tpu"
    taken = {"backend": "gpu", "reason": "Pallas kernel by Triton"}
    assert backends.implementations("gpu")["expert_matmul"] == taken
    report = Operations("tpu").report(jnp.float32, [bf16], [int4], ("sampling", "attention"))
    assert list(report) == ["matmul bf16", "expert_matmul int4", "attention", "sampling"]
    assert "expert_matmul" not in " ".join(Operations("tpu").report(jnp.float32, [bf16], [], ()))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("quantise", [False, True])
def test_joined_products_share_rows_of_x(form, quantise):
    """Three experts of each of two rows, one of them another core's."""
    gate, up = (jax.tree.map(jnp.asarray, quantize(m, FORMATS[form])) for m in (STACK, STACK[::-1].copy()))
    x = jnp.asarray(np.random.default_rng(5).standard_normal((2, K)), jnp.float32)
    experts = np.array([4, 0, -1, 2, 4, 1], np.int32)
    act = Activation(name="silu")
    arguments = {"of": E, "backend": "cpu", "quantise": quantise}
    got = api.gated(x, gate, up, 1, experts, activation=act, **arguments)
    rows = jnp.repeat(x, 3, axis=0)
    halves = (api.expert_matmul(rows, weight, 1, experts, **arguments) for weight in (gate, up))
    np.testing.assert_allclose(got, activate(act, *halves), rtol=1e-6, atol=1e-6)
    assert not np.asarray(got)[2].any()
    plain = api.gated(x, gate, up, 1, experts, activation=act, of=E, backend="reference")
    np.testing.assert_allclose(got, plain, rtol=0.05 if quantise else 1e-5, atol=0.2 if quantise else 2e-4)
