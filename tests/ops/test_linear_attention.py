"""A token through a linear mixer: the kernel against plain JAX, which `tests/layers` hold against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.ops.bits import from_bits, to_bits
from jaxwafer.ops.linear_attention.api import choose, linear_attention
from jaxwafer.ops.linear_attention.form import Form, Projected
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step

pytestmark = pytest.mark.skipif(choose("cpu") != "cpu", reason="no kernel here")
LAYERS, ROWS = 2, 4
KDA = Form(key_dim=5, value_dim=7, eps=1e-5, gate="sigmoid")


@partial(jax.jit, static_argnames=("form", "backend"))
def run(projected, weights, index, cache, layer, slot, step, form, backend):
    return linear_attention(
        projected, weights, index, cache, layer, slot, step, form, backend=backend, recurrence="reference"
    )


def noise(*shape, seed):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def inputs(form: Form, *, groups=2, each=1, taps=4, channels=True, batch=3, past=jnp.float32, gate=jnp.float32):
    heads = groups * each
    q, k = noise(2, batch, 1, groups * form.key_dim, seed=1)
    v, g = noise(2, batch, 1, heads * form.value_dim, seed=2)
    decays = heads * form.key_dim if channels else heads
    projected = Projected(q=q, k=k, v=v, z=3 * noise(batch, 1, decays, seed=3), beta=noise(batch, 1, heads, seed=4),
                          gate=jnp.asarray(g, gate))  # fmt: skip
    weights = {
        f"{name}_conv": noise(LAYERS, x.shape[-1], 1, taps, seed=5) for name, x in (("q", q), ("k", k), ("v", v))
    }
    weights |= {"a_log": noise(LAYERS, 1, 1, heads, 1, seed=6), "dt_bias": noise(LAYERS, decays, seed=7)}
    weights["o_norm"] = noise(LAYERS, form.value_dim, seed=8)
    shapes = {f"{name}_past": (taps - 1, x.shape[-1]) for name, x in (("q", q), ("k", k), ("v", v))}
    cache = {name: State(values=to_bits(jnp.asarray(noise(LAYERS, ROWS, *shape, seed=9)), past))
             for name, shape in shapes.items()}  # fmt: skip
    cache["state"] = State(values=jnp.asarray(noise(LAYERS, ROWS, heads, form.key_dim, form.value_dim, seed=10)))
    return projected, weights, jnp.int32(1), cache, jnp.int32(0)


def request(slot, start):
    slot, start = np.array(slot, np.int32), np.array(start, np.int32)
    return slot, Step(
        start=start, count=(slot >= 0).astype(np.int32), table=np.zeros((len(slot), 1), np.int32), slot=slot
    )


def assert_equal(given, form, slot=(2, 0, 3), start=(5, 0, 1), tolerance=2e-5):
    """Outputs of live rows and every row of the cache, written or not."""
    slot, step = request(slot, start)
    found, after = run(*given, slot, step, form, "cpu")
    wanted, expected = run(*given, slot, step, form, "reference")
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    live = slot >= 0
    np.testing.assert_allclose(
        np.asarray(found, np.float32)[live], np.asarray(wanted, np.float32)[live], rtol=tolerance, atol=tolerance
    )
    for name, state in expected.items():
        one, other = (np.asarray(from_bits(s.values), np.float32) for s in (after[name], state))
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("keys, values", [(1, 1), (5, 7), (16, 16), (33, 40), (128, 128)])
@pytest.mark.parametrize("bound", [None, -5.0, 0.0])
def test_decay_of_a_channel(keys, values, bound):
    form = Form(keys, values, 1e-5, gate="sigmoid", lower_bound=bound)
    assert_equal(inputs(form), form)


@pytest.mark.parametrize("groups, each", [(1, 1), (2, 3), (3, 2)])
def test_decay_of_a_head_and_shared_keys(groups, each):
    form = Form(8, 20, 1e-6, gate="silu")
    assert_equal(inputs(form, groups=groups, each=each, channels=False), form)


@pytest.mark.parametrize("taps", [1, 2, 3, 4, 5, 9])
def test_any_number_of_taps(taps):
    assert_equal(inputs(KDA, taps=taps), KDA)


def test_past_inputs_in_bfloat16():
    """Those written are the same numbers, since both round to the nearest."""
    given = inputs(KDA, past=jnp.uint16)
    assert_equal(given, KDA)
    slot, step = request([2, 0, 3], [5, 0, 1])
    written = [run(*given, slot, step, KDA, backend)[1]["k_past"].values for backend in ("cpu", "reference")]
    np.testing.assert_array_equal(*written)


def test_the_output_has_the_gates_dtype():
    assert_equal(inputs(KDA, gate=jnp.bfloat16), KDA, tolerance=1e-2)


@pytest.mark.parametrize("size", [0.0, 30.0, 1e4])
def test_decays_of_any_strength(size):
    projected, *rest = inputs(KDA)
    assert_equal((projected.replace(z=size * projected.z), *rest), KDA)


def test_a_row_without_a_request_writes_nothing_whatever_it_holds():
    projected, weights, index, cache, layer = inputs(KDA)
    broken = jax.tree.map(lambda x: np.where(np.arange(3)[:, None, None] == 1, np.nan, x), projected)
    assert_equal((broken, weights, index, cache, layer), KDA, slot=(2, -1, 3))


def test_a_first_token_finds_zeros_even_where_the_last_owner_left_none():
    projected, weights, index, cache, layer = inputs(KDA)
    left = {name: State(values=state.values.at[0, 0].set(jnp.nan)) for name, state in cache.items()}
    slot, step = request([2, 0, 3], [5, 0, 1])
    found, after = run(projected, weights, index, left, layer, slot, step, KDA, "cpu")
    wanted, expected = run(projected, weights, index, cache, layer, slot, step, KDA, "cpu")
    np.testing.assert_array_equal(found, wanted)
    for name in cache:
        np.testing.assert_array_equal(after[name].values, expected[name].values)


def test_a_donated_cache_is_updated_where_it_lies():
    """The compiled step holds no second state."""
    form = Form(64, 64, 1e-5, gate="sigmoid")
    given, (slot, step) = inputs(form), request([2, 0, 3], [5, 0, 1])
    donated = jax.jit(run.__wrapped__, static_argnames=("form", "backend"), donate_argnums=3)
    compiled = donated.lower(*given, slot, step, form=form, backend="cpu").compile()
    state = given[3]["state"].values
    assert compiled.memory_analysis().temp_size_in_bytes < 0.2 * state.nbytes
