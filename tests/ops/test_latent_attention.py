"""Latent attention over some of a request's blocks: parts of a softmax that join to the whole, in NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxwafer.ops.attention.api import BACKENDS, choose, latent_attention
from jaxwafer.ops.attention.reference import CHUNK, NEVER, owned
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step

from .kernels import interpreted

HEADS, WIDTH, RANK, LAYER, SCALE = 3, 10, 7, 1, 0.3
run = jax.jit(latent_attention, static_argnames=("rank", "scale", "backend"))


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request, monkeypatch):
    """Every test, with each backend; the TPU's and the GPU's are interpreted."""
    if request.param == "cpu" and choose(jnp.float32, "cpu") != "cpu":
        pytest.skip("no kernel here")
    monkeypatch.setitem(USED, "backend", request.param)
    with interpreted(request.param):
        yield


USED = {"backend": "reference"}


def attend(*args, **kwargs):
    return run(*args, layer=jnp.int32(LAYER), rank=RANK, scale=SCALE, **USED, **kwargs)


def case(lengths, counts, *, tokens=1, block=4, columns=9, parts=1, form="f32"):
    """Requests of `lengths` tokens, of which the last `counts` are the queries; blocks dealt at random over `parts`
    equal runs; what no request owns is not a number. Returns q, each run's pages, the step and the rows of each."""
    rng, batch = np.random.default_rng(sum(lengths)), len(lengths)
    each = -(-(batch * columns + 3) // parts)
    table = rng.permutation(each * parts)[: batch * columns].reshape(batch, columns)
    dtype = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}[form]
    values = np.full((2, each * parts, block, 1, WIDTH), np.nan, dtype)
    exponent = rng.integers(-2, 2, values.shape[:-1], np.int8)
    rows = []
    for b, length in enumerate(lengths):
        at = LAYER, table[b, np.arange(length) // block], np.arange(length) % block, 0
        values[at] = rng.standard_normal((length, WIDTH))
        rows.append(values[at].astype(np.float64) * (2.0 ** exponent[at][:, None] if form == "fp8" else 1.0))
    start = np.maximum(np.array(lengths) - np.array(counts), 0)
    step = Step(*(jnp.asarray(a, jnp.int32) for a in (start, counts, table, np.zeros(batch))))
    runs = [slice(n * each, (n + 1) * each) for n in range(parts)]
    pages = [
        Pages(values=jnp.asarray(values[:, r]), exponent=jnp.asarray(exponent[:, r]) if form == "fp8" else None)
        for r in runs
    ]
    return jnp.asarray(rng.standard_normal((batch, tokens, HEADS, WIDTH)), jnp.float32), pages, step, rows


def joined(q, pages, step) -> np.ndarray:
    """The softmax over the blocks of all runs, [B, T, heads, rank]; 0 where nothing was seen."""
    first = np.cumsum([0, *(p.blocks for p in pages)])
    parts = [attend(q, p, step=step, first=jnp.int32(n)) for p, n in zip(pages, first[:-1], strict=True)]
    highest, total, mixed = (np.stack([np.asarray(p[i], np.float64) for p in parts]) for i in range(3))
    assert np.isfinite(mixed).all() and np.isfinite(total).all()
    assert not total[np.isneginf(highest)].any() and not mixed[np.isneginf(highest)].any()
    top = highest.max(0)
    weight = np.exp(highest - np.where(np.isfinite(top), top, 0.0))
    total, mixed = (weight * total).sum(0), (weight[..., None] * mixed).sum(0)
    return mixed / np.where(total > 0, total, 1.0)[..., None]


def check(lengths, counts, tokens=1, **shape):
    q, pages, step, rows = case(lengths, counts, tokens=tokens, **shape)
    got = joined(q, pages, step)
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for t in range(count):
            seen = rows[b][: length - count + t + 1]
            score = np.exp(SCALE * np.asarray(q[b, t], np.float64) @ seen.T)
            want = score / score.sum(-1, keepdims=True) @ seen[:, :RANK]
            np.testing.assert_allclose(got[b, t], want, atol=3e-6, err_msg=f"request {b}, token {t}")
        if count == 0:
            assert not got[b].any()


@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("lengths", [[1, 3, 4, 5], [8, 9, 36, 35]])
def test_runs_of_blocks_join_to_the_whole_at_every_length_around_a_block(lengths, parts):
    check(lengths, [1] * 4, parts=parts)


def test_several_tokens_each_see_what_came_before_them_and_pad_rows_see_nothing():
    check([5, 35, 3, 20], [5, 2, 3, 0], 5, parts=2)


def test_lengths_around_the_chunks_that_the_loop_reads():
    columns = 2 * CHUNK // 32 + 1
    check([CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 32], [1] * 4, block=32, columns=columns, parts=2)


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_narrow_caches_are_read_as_what_they_hold(form):
    check([9, 30, 4, 1], [1] * 4, parts=2, form=form)


def test_only_a_requests_own_live_blocks_are_visited():
    """Blocks 4 to 7 are here. Request 0 has 9 tokens in blocks of 4, so its last column is not live; request 1 is a pad
    row; request 2 has nothing here."""
    table = jnp.asarray([[6, 1, 4, 5], [4, 5, 6, 7], [0, 1, 2, 8]], jnp.int32)
    start, count = jnp.asarray([8, 3, 15], jnp.int32), jnp.asarray([1, 0, 1], jnp.int32)
    step = Step(start=start, count=count, table=table, slot=jnp.zeros(3, jnp.int32))
    pages = Pages(values=jnp.zeros((1, 4, 4, 1, WIDTH)), exponent=None)
    blocks, begin = owned(step, pages, jnp.int32(4))
    np.testing.assert_array_equal(begin, [[0, 8, NEVER, NEVER], [NEVER] * 4, [NEVER] * 4])
    assert np.asarray(blocks)[0, :2].tolist() == [2, 0]
