"""The quantised matmul of each backend against the reference, and the choice between them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxwafer.model.mlp import Activation
from jaxwafer.ops import backends, native_weights
from jaxwafer.ops.matmul import api
from jaxwafer.ops.norm import rms_norm
from jaxwafer.quant import convert
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import FORMATS, fp8, int4

# What float32 sums of up to a few hundred products may differ by, of the sum of their magnitudes.
TOLERANCE = 1e-6
FORMS = FORMATS | {
    form.name: form for form in (int4(64, "bfloat16"), int4(128, "float16"), int4(64, "float32", zero=True), fp8(64))
}
INTEGERS = sorted(name for name, form in FORMS.items() if form.dtype in native_weights.INTEGERS)


@pytest.fixture(scope="module", autouse=True)
def native():
    if api.choose(jnp.float32, [FORMATS["f32"]], "cpu") != "cpu":
        pytest.skip(api.explain(jnp.float32, FORMATS["f32"], "cpu")[1])


def weights(name: str, shape, seed: int = 0) -> QuantizedArray:
    matrix = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jax.tree.map(jnp.asarray, convert.quantize(matrix, FORMS[name]))


def activations(shape, dtype, seed: int = 1) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def check(got, x, weight, index):
    """got is the reference's result for x widened to float32: the kernel does not round weights to x's dtype."""
    wide = x.astype(jnp.float32)
    want = api.matmul(wide, weight, index, backend="reference")
    # |x| · |W|ᵀ bounds what rounding can do.
    matrix = np.abs(convert.dequantize(jax.tree.map(np.asarray, weight))[index][:, : x.shape[-1]])
    assert got.dtype == jnp.float32
    np.testing.assert_array_less(np.abs(got - want), TOLERANCE * (np.abs(wide) @ matrix.T) + 1e-30)


@pytest.mark.parametrize("shape", [(1, 32), (1, 7), (7, 45), (37, 100), (19, 1100)], ids=str)
@pytest.mark.parametrize("name", sorted(FORMS))
def test_every_format_agrees_with_the_reference(name, shape):
    weight = weights(name, (3, *shape))
    for dtype in (jnp.float32, jnp.bfloat16):
        for rows in (1, 2, 5, 16, 33):
            x = activations((rows, shape[1]), dtype)
            check(api.matmul(x, weight, 1, backend="cpu"), x, weight, 1)


def rounded(x) -> np.ndarray:
    """x as int8 in blocks of 32 with a scale of amax/127 each, float64 again."""
    wide = np.asarray(x, np.float32)
    pad = -wide.shape[1] % 32
    blocks = np.pad(wide, ((0, 0), (0, pad))).reshape(len(wide), -1, 32)
    scale = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    q = np.rint(blocks * np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0))
    return (q.astype(np.float64) * scale).reshape(len(wide), -1)[:, : wide.shape[1]]


@pytest.mark.parametrize("shape", [(1, 7), (37, 100), (70, 1100)], ids=str)
@pytest.mark.parametrize("name", INTEGERS)
def test_activations_in_int8(name, shape):
    """The products of what x is rounded to; a number that falls between two may go either way."""
    weight = weights(name, (2, *shape))
    matrix = convert.dequantize(jax.tree.map(np.asarray, weight))[1][:, : shape[1]].astype(np.float64)
    for dtype in (jnp.float32, jnp.bfloat16):
        for rows in (1, 2, 7, 16, 35):
            x = activations((rows, shape[1]), dtype)
            got = api.matmul(x, weight, 1, backend="cpu", quantise=True)
            slack = np.abs(x).max() / 127 * np.abs(matrix).max() * 1.01
            np.testing.assert_allclose(got, rounded(x) @ matrix.T, atol=float(slack), rtol=0)
            # Rounding x loses 5e-3.
            loss = 1e-5 if dtype == jnp.float32 else 3e-3  # bfloat16 has numbers half-way between two
            assert np.linalg.norm(np.asarray(got) - rounded(x) @ matrix.T) < loss * np.linalg.norm(got)


@pytest.mark.parametrize("name", INTEGERS)
def test_bad_values_in_int8_reach_their_row_alone(name):
    weight = weights(name, (1, 5, 64))
    for rows in (3, 17):
        for bad in (np.nan, np.inf, -np.inf):
            x = np.ones((rows, 64), np.float32)
            x[1, 40] = bad
            got = np.asarray(api.matmul(jnp.asarray(x), weight, 0, backend="cpu", quantise=True))
            assert not np.isfinite(got[1]).any()
            assert np.isfinite(np.delete(got, 1, axis=0)).all()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_several_matrices_of_normed_rows(dtype):
    """Formats, orders and sizes may differ; the norm's row is that of the layer."""
    names = ("int4", "fp8", "int4-min", "mxfp4", "f32", "int4")
    several = [weights(name, (3, n, 70), seed=n) for n, name in enumerate(names, 3)]
    norm = jnp.asarray(np.random.default_rng(5).normal(size=(3, 70)), jnp.float32)
    for rows in (1, 20):
        x = activations((rows, 70), dtype)
        got = api.project(x, norm, several, 2, eps=1e-5, backend="cpu")
        normed = rms_norm(x, norm[2], 1e-5)
        for out, weight in zip(got, several, strict=True):
            want = api.matmul(normed, weight, 2, backend="cpu")
            # Sums of squares in another order may round a normed value to the next bfloat16.
            np.testing.assert_allclose(out, want, atol=2e-5 if dtype == jnp.float32 else 0.1, rtol=0)
        again = api.project(x, norm, several, 2, eps=1e-5, backend="reference")
        np.testing.assert_allclose(got[4], again[4], atol=2e-5 if dtype == jnp.float32 else 0.1, rtol=0)


@pytest.mark.parametrize(
    "activation",
    [Activation(), Activation(name="situ", limits=(4.0, 25.0)), Activation(name="swiglu-oai", limits=(1.5,))],
    ids=lambda a: a.name,
)
def test_gate_and_up_joined(activation):
    gate, up = (weights(name, (2, 77, 70), seed=9) for name in ("int4", "int8"))
    norm = 3 * jnp.asarray(np.random.default_rng(5).normal(size=(2, 70)), jnp.float32)
    for rows in (1, 20):
        x = activations((rows, 70), jnp.float32)
        for weight in (norm, None):
            got, want = (
                api.gated(x, weight, gate, up, 1, eps=1e-5, activation=activation, backend=backend)
                for backend in ("cpu", "reference")
            )
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-4)


@pytest.mark.parametrize("name", ["fp8", "int4", "int8-g32"])
def test_many_rows_and_outputs(name):
    """More than one tile of outputs, of rows and of inputs."""
    weight = weights(name, (1, 70, 1100))
    x = activations((101, 1100), jnp.float32)
    check(api.matmul(x, weight, 0, backend="cpu"), x, weight, 0)


def test_a_hand_computed_case():
    """int4: nibbles 8 + (1, 2, 0, …) with scale 0.5 are 0.5, 1, 0, …"""
    nibbles = np.full((1, 1, 32), 8, np.uint8)
    nibbles[..., :2] = 9, 10
    weight = QuantizedArray(convert.pack(nibbles), np.full((1, 1, 1), 0.5, np.float16), None, format=FORMATS["int4"])
    x = np.arange(3, 35, dtype=np.float32)[None]
    assert api.matmul(jnp.asarray(x), weight, 0, backend="cpu").tolist() == [[3 * 0.5 + 4 * 1.0]]


def test_every_stored_value_of_the_8_and_16_bit_formats():
    """One output for each bit pattern, read as itself: subnormals are kept, infinities and NaNs come out as such."""
    for name, dtype in (("fp8", np.uint8), ("int8", np.uint8), ("f16", np.uint16), ("bf16", np.uint16)):
        form = FORMATS[name]
        stored = np.arange(np.iinfo(dtype).max + 1, dtype=dtype).view(form.numpy).reshape(1, -1, 1)
        scale = None if form.scale is None else jnp.ones(stored.shape, form.scale_numpy)
        weight = QuantizedArray(jnp.asarray(stored), scale, None, format=form)
        want = stored.astype(np.float32)[0, :, 0]
        # XLA flushes what is denormal in float32.
        want = np.where(np.abs(want) < np.finfo(np.float32).tiny, 0, want)
        for rows in (1, 17):
            got = api.matmul(jnp.ones((rows, 1), jnp.float32), weight, 0, backend="cpu")
            np.testing.assert_array_equal(got, np.broadcast_to(want, got.shape))


@pytest.mark.parametrize("name", sorted(FORMS))
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_bad_values_reach_the_outputs_they_touch_and_no_others(name, bad):
    weight = weights(name, (1, 5, 64))
    for rows in (3, 17):
        x = np.ones((rows, 64), np.float32)
        x[1, 40] = bad
        got = np.asarray(api.matmul(jnp.asarray(x), weight, 0, backend="cpu"))
        assert not np.isfinite(got[1]).any()
        assert np.isfinite(np.delete(got, 1, axis=0)).all()
    part = "values" if FORMS[name].scale is None else "scale"
    if FORMS[name].scale == "float8_e8m0fnu":
        bad = np.nan
    broken = weight.replace(**{part: getattr(weight, part).at[0, 2, 0].set(bad)})
    for rows in (1, 17):
        got = np.asarray(api.matmul(jnp.ones((rows, 64), jnp.float32), broken, 0, backend="cpu"))
        assert not np.isfinite(got[:, 2]).any()
        assert np.isfinite(np.delete(got, 2, axis=1)).all()


def test_index_is_traced_and_clamped():
    weight = weights("int4", (3, 5, 64))
    x = activations((2, 64), jnp.float32)
    at = jax.jit(lambda index: api.matmul(x, weight, index, backend="cpu"))
    each = [at(i) for i in range(3)]
    assert not np.array_equal(each[0], each[2])
    for index, same in ((-5, 0), (3, 2), (2**31 - 1, 2)):
        np.testing.assert_array_equal(at(index), each[same])


def test_leading_axes_vmap_and_empty():
    weight = weights("int8", (2, 5, 40))
    x = activations((2, 3, 40), jnp.bfloat16)
    out = api.matmul(x, weight, 1, backend="cpu")
    assert out.shape == (2, 3, 5)
    mapped = jax.vmap(lambda row, i: api.matmul(row, weight, i, backend="cpu"))(x, jnp.array([1, 1]))
    np.testing.assert_array_equal(mapped, out)
    assert api.matmul(x[:0], weight, 1, backend="cpu").shape == (0, 3, 5)


def test_unaligned_rows_of_bytes():
    """A stack whose matrices start at odd addresses."""
    weight = weights("fp8", (3, 3, 33))
    x = activations((1, 33), jnp.float32)
    for index in range(3):
        check(api.matmul(x, weight, index, backend="cpu"), x, weight, index)


@pytest.mark.parametrize("name", ["f32", "int4"])
def test_inside_shard_map_loops_and_branches(name):
    """On four devices at once, with outputs sharded: what the reference gives, and no stall."""
    mesh = Mesh(np.array(jax.devices()[:4]), ("core",))
    weight = weights(name, (3, 256, 256))
    x = activations((2, 256), jnp.float32)
    spec = jax.tree.map(lambda _: P(None, "core"), weight)

    def run(backend):
        def shard(x, weight):
            def step(i, y):
                out = api.matmul(y, weight, i % 3, backend=backend)
                out = lax.cond(i % 2 == 0, lambda o: o, lambda o: o + api.matmul(y, weight, 0, backend=backend), out)
                return jnp.tanh(lax.all_gather(out, "core", axis=1, tiled=True) / 16)  # keeps rounding from growing

            return lax.fori_loop(0, 6, step, x)

        return jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=(P(), spec), out_specs=P(), check_vma=False))(x, weight)

    np.testing.assert_allclose(run("cpu"), run("reference"), rtol=0, atol=1e-5)


def test_while_loop_over_bfloat16():
    weight = weights("bf16", (4, 64, 64))

    def body(carry):
        i, y = carry
        return i + 1, jnp.tanh(api.matmul(y, weight, i, backend="cpu")).astype(jnp.bfloat16)

    x = activations((1, 64), jnp.bfloat16)
    _, got = jax.jit(lambda y: lax.while_loop(lambda c: c[0] < 4, body, (jnp.int32(0), y)))(x)
    want = np.asarray(x)
    for i in range(4):
        matrix = np.asarray(weight.values[i], np.float32)
        want = np.tanh(np.asarray(want, np.float32) @ matrix.T).astype(ml_dtypes.bfloat16)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), atol=0.02)


def test_choice_and_its_reasons():
    for form in FORMS.values():
        for dtype in (jnp.float32, jnp.bfloat16):
            assert api.choose(dtype, [form], "cpu") == "cpu"
        assert api.choose(jnp.float32, [form], "tpu") == ("reference" if form.name == "f16" else "tpu")
    odd = replace(FORMATS["int4"], name="int4-g16", group=16)
    assert api.explain(jnp.float32, odd, "cpu") == ("reference", "no kernel for int4-g16 weights")
    assert api.choose(jnp.float32, [FORMATS["int4"], odd], "cpu") == "reference"
    assert api.explain(jnp.float16, FORMATS["int4"], "cpu") == ("reference", "no kernel for float16 activations")
    on_cpu = backends.implementations("cpu")
    assert set(on_cpu) >= {"matmul", "expert_matmul", "attention", "sampling"}
    assert on_cpu["matmul"]["backend"] == "cpu"
    assert on_cpu["matmul"]["reason"].startswith("C++ kernel, float32 activations, built with ")
    assert "int8 activations" in api.explain(jnp.float32, FORMATS["int4"], "cpu", quantise=True)[1]
    assert "float32 activations" in api.explain(jnp.float32, FORMATS["fp8"], "cpu", quantise=True)[1]
    assert api.explain(jnp.float32, FORMATS["f32"], "gpu") == ("reference", "no GPU kernel for f32 weights")
    assert api.choose(jnp.float32, [FORMATS["int4"]], "gpu") == "gpu"


def test_formats_that_differ_are_told_apart(monkeypatch):
    def objection(dtype, form, platform):
        return None if form.name == "int4" else f"no kernel for {form.name} weights"

    monkeypatch.setattr(api.cpu, "objection", objection)
    got = api.implementation("cpu")
    assert got["backend"].startswith("reference (f32 bf16 ") and got["backend"].endswith(", cpu (int4)")
