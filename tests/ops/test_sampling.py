"""Sampling over a sharded vocabulary against a NumPy reference on full logits, on four meshes, and against its laws."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from scipy.stats import chi2

from jaxwafer.errors import UserError
from jaxwafer.ops.sampling import SamplingState, logprob, reference, sample

MESHES = [(), (1, 2), (2, 2), (4, 2)]
AXES = ("wafer", "core")
INF = np.inf


def state(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    def full(value, dtype):
        return jnp.asarray(np.broadcast_to(np.asarray(value, dtype), (rows,)))

    return SamplingState(
        temperature=full(temperature, np.float32),
        top_k=full(top_k, np.int32),
        top_p=full(top_p, np.float32),
        min_p=full(min_p, np.float32),
        seed=full(seed, np.uint32),
    )


def sharded(local, shape, replicated, *, out):
    """jit of `local(logits, offset, *args, axes=)` on full logits, padded with -inf to a multiple of 8 rows."""
    axes = AXES if shape else ()

    def padded(logits):
        return jnp.pad(logits, ((0, 0), (0, -logits.shape[1] % 8)), constant_values=-INF)

    if not shape:
        return jax.jit(lambda logits, *args: local(padded(logits), 0, *args, axes=axes))
    mesh = Mesh(np.array(jax.devices()[: shape[0] * shape[1]]).reshape(shape), AXES)

    def shard(logits, *args):
        index = jax.lax.axis_index("wafer") * shape[1] + jax.lax.axis_index("core")
        return local(logits, index * logits.shape[1], *args, axes=axes)

    specs = (P(None, AXES), *[P()] * replicated)
    inner = jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    return jax.jit(lambda logits, *args: inner(padded(logits), *args))


@functools.cache
def sampler(shape=(), filters=True):
    return sharded(functools.partial(sample, filters=filters), shape, 2, out=P())


def draw(logits, how, position=0, shape=(), filters=True):
    logits = jnp.asarray(logits, jnp.float32)
    position = jnp.broadcast_to(jnp.asarray(position, jnp.int32), logits.shape[:1])
    return np.asarray(sampler(shape, filters)(logits, how, position))


@functools.cache
def masker(shape=()):
    def local(logits, offset, how, *, axes):
        return reference.allowed(
            reference.clean(logits),
            temperature=how.temperature,
            top_k=how.top_k,
            top_p=how.top_p,
            min_p=how.min_p,
            axes=axes,
        )

    return sharded(local, shape, 1, out=(P(None, AXES), P(None, AXES)))


def allowed(logits, how, shape=()):
    keep, _ = masker(shape)(jnp.asarray(logits, jnp.float32), how)
    return np.asarray(keep)[:, : np.shape(logits)[1]]


def expected(row, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Hugging Face's chain of warpers on one full row in float64, with ties kept: bool [V]."""
    score = np.asarray(row, np.float64) / temperature
    if top_k:
        kth = np.sort(score)[::-1][min(top_k, len(score)) - 1]
        score = np.where(score < kth, -INF, score)
    if top_p < 1:
        probability = softmax(score)
        order = np.argsort(-score, kind="stable")
        before = np.cumsum(probability[order]) - probability[order]
        last = score[order][before < max(top_p, 1e-30)].min()
        score = np.where(score < last, -INF, score)
    probability = softmax(score)
    return (score > -INF) & (probability >= min_p * probability.max())


def softmax(score):
    weight = np.exp(score - score.max())
    return weight / weight.sum()


ROWS, VOCABULARY = 4, 12
level = st.integers(-3, 3).map(lambda n: n / 2)
logit = st.one_of(level, st.floats(-8, 8, width=32, allow_subnormal=False), st.just(-INF))
row = st.lists(logit, min_size=VOCABULARY, max_size=VOCABULARY).filter(lambda r: max(r) > -INF)
filters = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.25, 0.7, 1.0, 4.0]),
        "top_k": st.integers(0, VOCABULARY + 2),
        "top_p": st.one_of(st.just(1.0), st.floats(0.015625, 1, width=32)),
        "min_p": st.one_of(st.just(0.0), st.floats(0.015625, 1, width=32)),
    }
)


@given(st.lists(st.tuples(row, filters), min_size=ROWS, max_size=ROWS))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_allowed_tokens_are_those_of_the_reference(cases):
    logits = np.array([r for r, _ in cases], np.float32)
    how = {name: [f[name] for _, f in cases] for name in cases[0][1]}
    got = allowed(logits, state(ROWS, **how))
    np.testing.assert_array_equal(got, allowed(logits, state(ROWS, **how), (2, 2)))
    for keep, values, (_, f) in zip(got, logits, cases, strict=True):
        # Rounding may decide for a token that lies on a limit to within 1e-5; everything else must agree.
        fewest = expected(values, f["temperature"], f["top_k"], f["top_p"] - 1e-5, min(f["min_p"] * (1 + 1e-5), 1))
        most = expected(values, f["temperature"], f["top_k"], f["top_p"] + 1e-5, f["min_p"] * (1 - 1e-5))
        assert (fewest <= keep).all() and (keep <= most).all(), (values, f, keep)


@pytest.mark.parametrize(
    "how, keep",
    [
        ({}, [1, 1, 1, 1, 1, 0, 1]),
        ({"top_k": 1}, [0, 1, 0, 0, 0, 0, 0]),
        ({"top_k": 2}, [1, 1, 0, 1, 0, 0, 1]),
        ({"top_k": 99}, [1, 1, 1, 1, 1, 0, 1]),
        ({"top_p": 0.0}, [0, 1, 0, 0, 0, 0, 0]),
        ({"top_p": 0.499}, [0, 1, 0, 0, 0, 0, 0]),
        ({"top_p": 0.501}, [1, 1, 0, 1, 0, 0, 1]),
        ({"top_p": 0.874}, [1, 1, 0, 1, 0, 0, 1]),
        ({"top_p": 0.876}, [1, 1, 1, 1, 1, 0, 1]),
        # Of what top-k leaves, the likeliest token is 4/7.
        ({"top_k": 2, "top_p": 0.57}, [0, 1, 0, 0, 0, 0, 0]),
        ({"top_k": 2, "top_p": 0.58}, [1, 1, 0, 1, 0, 0, 1]),
        ({"min_p": 0.126}, [1, 1, 0, 1, 0, 0, 1]),
        ({"min_p": 0.124}, [1, 1, 1, 1, 1, 0, 1]),
        ({"min_p": 2.0}, [0, 1, 0, 0, 0, 0, 0]),
        ({"temperature": 0.5, "min_p": 0.124}, [0, 1, 0, 0, 0, 0, 0]),
        ({"temperature": 1e30, "min_p": 0.9}, [1, 1, 1, 1, 1, 0, 1]),
    ],
)
def test_allowed_tokens_by_hand(how, keep):
    # Probabilities 1/8, 1/2, 1/16, 1/8, 1/16, 0, 1/8.
    logits = [[-np.log(8), -np.log(2), -np.log(16), -np.log(8), -np.log(16), -INF, -np.log(8)]]
    assert allowed(logits, state(1, **how))[0].tolist() == [bool(k) for k in keep]


def test_zeros_and_subnormals_are_one_value():
    zeros = np.array([[0.0, -0.0, 1e-40, -1e-40, -1.0]], np.float32)
    assert allowed(zeros, state(1, top_k=1))[0].tolist() == [True, True, True, True, False]
    assert draw(zeros[:, ::-1], state(1), filters=False).tolist() == [1]


def test_threshold_over_all_keys():
    """Keys that differ in the highest, in the middle and in the lowest bits alone, against a sort."""
    random = np.random.default_rng(0)
    spread = random.integers(0, 2**32, (5, 40), dtype=np.uint32)
    spread[1] = 0x80_00_00_00 + spread[1] % 7
    spread[2] = (spread[2] % 5) << 16
    spread[3] = (spread[3] % 3) << 24 | 0xFF_FF_FF
    spread[4] = 0xFF_FF_FF_FF
    find = jax.jit(functools.partial(reference.threshold, axes=()))
    for k in (1, 2, 17, 40):
        got = find(jnp.asarray(spread), jnp.ones_like(spread), jnp.full(5, k, jnp.uint32))
        assert np.asarray(got).tolist() == np.sort(spread)[:, 40 - k].tolist()
    assert find(jnp.asarray(spread), jnp.ones_like(spread), jnp.full(5, 41, jnp.uint32)).tolist() == [0] * 5


@pytest.fixture(scope="module")
def batch():
    """Rows of every sort over 21 tokens, which no mesh divides: random, tied, flat, extreme."""
    random = np.random.default_rng(1)
    logits = random.normal(0, 2, (32, 21)).astype(np.float32)
    logits[8:16] = np.round(logits[8:16])
    logits[16:20] = 0
    logits[20, :20] = -INF
    logits[21] *= 1e37
    how = state(
        32,
        temperature=random.choice([0, 0.3, 1, 50], 32),
        top_k=random.choice([0, 1, 3, 9, 30], 32),
        top_p=random.choice([1, 0.95, 0.5, 0.1], 32),
        min_p=random.choice([0, 0.1], 32),
        seed=random.integers(0, 2**32, 32),
    )
    return logits, how, random.integers(0, 1 << 20, 32)


@pytest.mark.parametrize("shape", MESHES[1:])
def test_every_mesh_gives_the_same_tokens(batch, shape):
    logits, how, position = batch
    np.testing.assert_array_equal(draw(logits, how, position, shape), draw(logits, how, position))
    np.testing.assert_array_equal(draw(logits, how, 0, shape, filters=False), draw(logits, how, 0, filters=False))


def test_noise_and_weights_do_not_depend_on_the_width_of_a_shard():
    """Bit for bit: a compiler that treats the end of a row differently would show here, long before in a token."""
    width = 203
    seed, position = jnp.arange(2, dtype=jnp.uint32), jnp.arange(2, dtype=jnp.int32)
    noise = jax.jit(reference.exponential_noise)
    whole = np.asarray(noise(seed, position, jnp.arange(width, dtype=jnp.int32)))
    parts = [noise(seed, position, jnp.arange(i, i + 29, dtype=jnp.int32)) for i in range(0, width, 29)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), whole)

    logits = np.random.default_rng(2).normal(0, 9, (2, 101)).astype(np.float32)
    how = state(2, temperature=[0.7, 3.0], top_p=0.9)
    one, many = (np.asarray(masker(s)(jnp.asarray(logits), how)[1]) for s in ((), (4, 2)))
    np.testing.assert_array_equal(one, many)


def test_a_row_does_not_depend_on_its_neighbours(batch):
    logits, how, position = batch
    together = draw(logits, how, position)
    order = np.random.default_rng(3).permutation(len(logits))
    moved = draw(logits[order], jax.tree.map(lambda a: a[order], how), position[order])
    np.testing.assert_array_equal(moved, together[order])
    for i in (0, 9, 17, 31):
        alone = draw(logits[[i]], jax.tree.map(lambda a, i=i: a[jnp.array([i])], how), position[[i]])
        assert alone.tolist() == [together[i]]


def test_seed_and_position_choose_the_stream():
    flat = np.zeros((64, 1000), np.float32)
    by_seed = draw(flat, state(64, seed=np.arange(64)))
    by_position = draw(flat, state(64), np.arange(64))
    both = np.concatenate([by_seed, by_position])
    # 127 draws of 1000 (seed 0 at position 0 is in both): about 8 coincide by chance.
    assert by_seed[0] == by_position[0]
    assert len(set(both.tolist())) > 105
    np.testing.assert_array_equal(by_seed, draw(flat, state(64, seed=np.arange(64))))


def test_rows_at_temperature_zero_are_greedy(batch):
    logits, how, position = batch
    greedy = draw(logits, how, filters=False)
    np.testing.assert_array_equal(greedy, logits.argmax(-1))
    np.testing.assert_array_equal(draw(logits, how.replace(temperature=jnp.zeros(32)), position), greedy)
    cold = np.asarray(how.temperature) == 0
    assert 0 < cold.sum() < 32
    np.testing.assert_array_equal(draw(logits, how, position)[cold], greedy[cold])


@pytest.mark.parametrize("shape", [(), (4, 2)])
def test_greedy_ties_go_to_the_lowest_id(shape):
    logits = np.full((32, 21), -1.0, np.float32)
    logits[0, [20, 4, 5]] = 2
    logits[2, [0, 20]] = 7
    assert draw(logits, state(32), shape=shape, filters=False).tolist() == [4, *[0] * 31]


@pytest.mark.parametrize("shape", [(), (4, 2)])
@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite(shape, full, temperature):
    logits = np.full((32, 21), -INF, np.float32)
    logits[0, 3:] = np.nan
    logits[1] = np.nan
    logits[1, 13] = -50.0
    logits[2] = 0
    logits[2, 6] = INF
    # The other rows are all -inf: like row 0 they have nothing to choose from, and give id 0.
    how = state(32, temperature=temperature, top_k=4, top_p=0.9, min_p=0.01)
    assert draw(logits, how, shape=shape, filters=full).tolist() == [0, 13, 6, *[0] * 29]


def test_samples_stay_within_what_is_allowed():
    row = np.array([2, 2, 1, 0, 0, -1, -INF, 3] + [-INF] * 8, np.float32)
    logits = np.tile(row, (8000, 1))
    for how in ({"top_k": 2}, {"top_p": 0.8}, {"min_p": 0.2}, {"temperature": 1e30}):
        tokens = draw(logits, state(8000, seed=np.arange(8000), **how))
        assert set(tokens.tolist()) == set(np.flatnonzero(expected(row, **how)).tolist()), how


@pytest.mark.parametrize("how", [{}, {"temperature": 2.0}, {"top_k": 5, "top_p": 0.9}])
@pytest.mark.parametrize("by", ["seed", "position"])
def test_samples_follow_the_softmax(how, by):
    rows = 8000
    row = np.random.default_rng(4).normal(0, 1.5, 16).astype(np.float32)
    index = np.arange(rows)
    drawn = state(rows, seed=index if by == "seed" else 7, **how)
    tokens = draw(np.tile(row, (rows, 1)), drawn, index if by == "position" else 0)
    keep = expected(row, **how)
    probability = softmax(np.where(keep, row / how.get("temperature", 1.0), -INF))
    count = np.bincount(tokens, minlength=16)
    assert count[~keep].sum() == 0
    wanted = probability[keep] * rows
    statistic = ((count[keep] - wanted) ** 2 / wanted).sum()
    # The seeds are fixed, so this passes or fails for good.
    assert statistic < chi2.ppf(0.99, keep.sum() - 1)


def test_noise_is_exponential():
    noise = np.asarray(
        jax.jit(reference.exponential_noise)(
            jnp.array([5], jnp.uint32), jnp.array([9], jnp.int32), jnp.arange(100_000, dtype=jnp.int32)
        )
    )[0]
    assert noise.min() > 0
    assert noise.mean() == pytest.approx(1, abs=0.015)
    assert np.median(noise) == pytest.approx(np.log(2), abs=0.015)
    # The small ones decide; from 23 random bits, several of these would be equal.
    assert len(np.unique(np.sort(noise)[:1000])) == 1000


def test_noise_is_keyed_as_documented():
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(11, impl="threefry2x32"), 22), 33)
    high, low = np.asarray(jax.random.key_data(key), np.float64)
    got = reference.exponential_noise(
        jnp.array([11], jnp.uint32), jnp.array([22], jnp.int32), jnp.array([33], jnp.int32)
    )
    assert float(got[0, 0]) == pytest.approx(-np.log1p(-(high / 2**32 + low / 2**64)), rel=1e-6)


def test_one_row_and_one_token_a_shard():
    logits = np.zeros((1, 8), np.float32)
    logits[0, -1] = 40
    assert draw(logits, state(1), shape=(4, 2)).tolist() == [7]
    assert draw(logits, state(1, top_k=1, temperature=100.0), shape=(4, 2)).tolist() == [7]


def test_nothing_is_sorted_or_branched_on_and_little_is_gathered():
    logits, position = jnp.zeros((4, 8000)), jnp.zeros(4, jnp.int32)
    program = str(jax.make_jaxpr(sampler((4, 2)))(logits, state(4), position))
    used = set(re.findall(r"= (\w+)", program))
    assert {"pmax", "all_gather"} < used
    assert not used & {"sort", "top_k", "approx_top_k", "cond", "while", "all_to_all"}
    # One value and one id a row and shard.
    assert re.findall(r"(\w+\[[\d,]*\]) = all_gather", program) == ["i32[2,4,8]"]


def test_top_p_adds_up_a_large_vocabulary():
    """150,000 tokens, where a float32 running sum would drift: two flat halves, and one token above a long tail."""
    logits = np.zeros((4, 150_000), np.float32)
    logits[:2, :75_000] = 1e-6
    logits[2:, 1:] = -13 * np.log(2)
    # The first of rows 2 and 3 has 1 / (1 + 149,999 / 2**13) = 0.0518 of the mass.
    keep = allowed(logits, state(4, top_p=[0.4999, 0.5001, 0.0517, 0.0519]))
    assert keep.sum(-1).tolist() == [75_000, 150_000, 1, 150_000]


def test_top_p_of_one_keeps_the_most_unlikely():
    assert allowed([[0.0, -60.0, -INF]], state(1)).tolist() == [[True, True, False]]
    assert allowed([[0.0, -60.0, -INF]], state(1, top_p=0.999999)).tolist() == [[True, False, False]]


def test_a_vocabulary_too_large_for_the_sums_is_refused():
    logits = jax.ShapeDtypeStruct((1, (1 << 20) + 1), jnp.float32)
    position = jnp.zeros(1, jnp.int32)
    with pytest.raises(UserError, match="vocabulary of 1048577 rows is too large"):
        jax.eval_shape(lambda x: sample(x, 0, state(1), position, axes=(), filters=True), logits)


@pytest.mark.parametrize("shape", MESHES)
def test_logprob(shape):
    random = np.random.default_rng(5)
    logits = random.normal(0, 5, (6, 21)).astype(np.float32)
    logits[1] += 1000
    logits[2] -= 1e5
    logits[3, :20] = -INF
    targets = np.array([0, 20, 7, 20, 13, 21], np.int32)
    got = np.asarray(sharded(logprob, shape, 1, out=P())(jnp.asarray(logits), jnp.asarray(targets)))
    wanted = np.asarray(jax.nn.log_softmax(jnp.asarray(logits), axis=-1))[np.arange(5), targets[:5]]
    np.testing.assert_allclose(got[:5], wanted, rtol=1e-6, atol=2e-6)
    assert got[3] == 0
    # Id 21 is a padding row here, or lies outside the vocabulary.
    assert got[5] == -INF


@pytest.mark.parametrize("shape", [(), (2, 2)])
def test_logprob_of_targets_outside_and_of_nan(shape):
    logits = np.zeros((4, 8), np.float32)
    logits[1, 5] = np.nan
    logits[2] = -INF
    targets = jnp.array([-1, 0, 0, 3], jnp.int32)
    got = np.asarray(sharded(logprob, shape, 1, out=P())(jnp.asarray(logits), targets))
    assert got[0] == -INF and np.isnan(got[1]) and np.isnan(got[2])
    assert got[3] == pytest.approx(-np.log(8), rel=1e-6)
