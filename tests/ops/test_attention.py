"""Paged attention against a softmax written out in NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxwafer.ops.attention.api import BACKENDS, choose, paged_attention
from jaxwafer.ops.attention.reference import CHUNK
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step

from .kernels import interpreted

HEADS, GROUP, DIM, LAYER, SCALE = 2, 3, 8, 1, 0.3
BLOCK, COLUMNS = 32, 2 * CHUNK // 32 + 1  # a table of two chunks and a block
run = jax.jit(paged_attention, static_argnames=("scale", "window", "backend"))
USED = {"backend": "reference"}


def attend(*args, **kwargs):
    return run(*args, layer=jnp.int32(LAYER), scale=SCALE, **USED, **kwargs)


@pytest.fixture(params=BACKENDS, autouse=True)
def backend(request, monkeypatch):
    """Every test, with each backend; the TPU's and the GPU's are interpreted."""
    if request.param == "cpu" and choose(jnp.float32, "cpu") != "cpu":
        pytest.skip("no kernel here")
    monkeypatch.setitem(USED, "backend", request.param)
    with interpreted(request.param):
        yield


def case(lengths, counts, tokens: int = 1, block: int = BLOCK, columns: int = COLUMNS, form: str = "f32", stale=np.nan):
    """Requests of `lengths` tokens, of which the last `counts` are the queries, in blocks dealt at random with holes.

    What no request owns is `stale`, rows behind a request's last token in its own blocks included. Returns the
    operation's arrays, the step, and each request's keys and values.
    """
    rng = np.random.default_rng(sum(lengths))
    batch, blocks = len(lengths), len(lengths) * columns + 3
    table = rng.permutation(blocks)[: batch * columns].reshape(batch, columns)
    dtype = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "fp8": ml_dtypes.float8_e4m3fn}[form]
    caches, rows = [], []
    for _ in "kv":
        values = np.full((2, blocks, block, HEADS, DIM), stale, dtype)
        exponent = rng.integers(-2, 2, values.shape[:-1], np.int8) if form == "fp8" else None
        mine = []
        for b, length in enumerate(lengths):
            at = LAYER, table[b, np.arange(length) // block], np.arange(length) % block
            values[at] = rng.standard_normal((length, HEADS, DIM))
            row = values[at].astype(np.float64)
            mine.append(row if exponent is None else row * 2.0 ** exponent[at][..., None])
        rows.append(mine)
        caches.append(Pages(values=jnp.asarray(values), exponent=None if exponent is None else jnp.asarray(exponent)))
    start = np.maximum(np.array(lengths) - np.array(counts), 0)
    step = Step(*(jnp.asarray(a, jnp.int32) for a in (start, counts, table, np.arange(batch))))
    q = jnp.asarray(rng.standard_normal((batch, tokens, HEADS, GROUP, DIM)), jnp.float32)
    return (q, *caches), step, rows


def expected(q, rows, lengths, counts, *, window=None, sinks=None) -> np.ndarray:
    q, (k, v) = np.asarray(q, np.float64), rows
    out = np.zeros(q.shape)
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        for t in range(count):
            end = length - count + t + 1
            seen = slice(max(0, end - (window or end)), end)
            weight = np.exp(SCALE * np.einsum("hgd,shd->hgs", q[b, t], k[b][seen]))
            total = weight.sum(-1) + (0 if sinks is None else np.exp(np.asarray(sinks, np.float64)))
            out[b, t] = np.einsum("hgs,shd->hgd", weight / total[..., None], v[b][seen])
    return out


def check(lengths, counts=(1, 1, 1, 1), tokens: int = 1, *, window=None, sinks=None, **shape):
    arrays, step, rows = case(lengths, counts, tokens, **shape)
    got = np.asarray(attend(*arrays, step=step, window=window, sinks=sinks))
    want = expected(arrays[0], rows, lengths, counts, window=window, sinks=sinks)
    for b, count in enumerate(counts):
        np.testing.assert_allclose(got[b, :count], want[b, :count], atol=3e-6, err_msg=f"request {b}")
    assert got.dtype == np.float32 and got.shape == arrays[0].shape


@pytest.mark.parametrize("lengths", [[1, 31, 32, 33], [63, 64, 65, 2], [300, 1, 1, 300]])
def test_decoding_at_every_length_around_a_block_with_stale_rows_that_are_not_numbers(lengths):
    check(lengths)


@pytest.mark.parametrize("lengths", [[CHUNK - 1, CHUNK, CHUNK + 1, 1], [2 * CHUNK - 1, 2 * CHUNK, 2 * CHUNK + 1, 7]])
def test_decoding_around_the_chunks_that_the_loop_reads(lengths):
    check(lengths)


def test_a_table_that_is_no_whole_number_of_chunks_is_read_to_its_end():
    check([COLUMNS * BLOCK, COLUMNS * BLOCK - 1, 2 * CHUNK + 1, 1])


def test_blocks_larger_than_a_chunk():
    check([2 * CHUNK + 5, 3], (1, 1), block=2 * CHUNK, columns=2)


def test_a_table_smaller_than_a_chunk():
    check([9, 16, 17], (1, 1, 1), block=8, columns=3)


@pytest.mark.parametrize(
    "lengths, counts", [([5, 35, 32], [5, 5, 5]), ([5, 300, 1], [5, 3, 1]), ([33, 4, 5], [2, 4, 0])]
)
def test_several_tokens_each_see_what_came_before_them(lengths, counts):
    check(lengths, counts, 5)


@pytest.mark.parametrize("stale", [np.nan, np.inf, -np.inf, 1e30])
def test_pad_rows_do_not_spoil_their_neighbours_and_rows_that_see_nothing_are_zero(stale):
    lengths, counts = [0, 9, 0, 0], [0, 1, 0, 0]
    arrays, step, rows = case(lengths, counts, stale=stale)
    got = np.asarray(attend(*arrays, step=step))
    np.testing.assert_allclose(got[1], expected(arrays[0], rows, lengths, counts)[1], atol=3e-6)
    assert not got[[0, 2, 3]].any()


def test_a_batch_without_any_live_row_is_zero():
    arrays, step, _ = case([0] * 4, [0] * 4)
    assert not np.asarray(attend(*arrays, step=step)).any()


def test_scores_of_any_size_stay_finite():
    (q, k, v), step, rows = case([20, 9, 300, 1], [1] * 4)
    got = np.asarray(attend(q * 1e4, k, v, step=step))
    # So far apart that the softmax is the largest score's value.
    q = np.asarray(q, np.float64)
    for b, (keys, values) in enumerate(zip(*rows, strict=True)):
        best = np.einsum("hgd,shd->hgs", q[b, 0], keys).argmax(-1)
        for head in range(HEADS):
            np.testing.assert_allclose(got[b, 0, head], values[best[head], head], atol=2e-5)


def test_a_request_does_not_depend_on_its_neighbours_to_the_bit():
    arrays, step, _ = case([9, 300, 33, 520], [1] * 4)
    together = np.asarray(attend(*arrays, step=step))
    for b in range(4):
        alone = step.replace(**{n: jnp.where(jnp.arange(4) == b, getattr(step, n), 0) for n in ("start", "count")})
        np.testing.assert_array_equal(attend(*arrays, step=alone)[b], together[b])


@pytest.mark.parametrize("form", ["bf16", "fp8"])
def test_narrow_caches_are_read_as_what_they_hold(form):
    check([9, 300, 33, 1], form=form)


@pytest.mark.parametrize("window", [1, 2, 31, 32, 33, 50, 600])
def test_a_window_sees_its_last_keys_alone(window):
    check([9, 300, 33, 1], window=window)


def test_a_window_slides_with_each_token_of_a_chunk():
    check([5, 300, 34], [5, 3, 1], 5, window=3)


def test_a_sink_takes_its_share_of_the_softmax_and_adds_nothing():
    check([9, 300, 33, 1], sinks=jnp.asarray(np.random.default_rng(0).standard_normal((HEADS, GROUP)), jnp.float32))


def test_a_sink_beside_a_window_for_each_token_of_a_chunk():
    """A window across two chunks of the loop, and one that begins in the second."""
    sinks = jnp.asarray(np.random.default_rng(1).standard_normal((HEADS, GROUP)), jnp.float32)
    check([5, CHUNK + 4, 3 * BLOCK], [5, 5, 2], 5, window=7, sinks=sinks)


@pytest.mark.parametrize("sink", [-300.0, 80.0, 300.0])
def test_a_sink_of_any_size_keeps_the_output_finite(sink):
    arrays, step, _ = case([20, 9, 300, 1], [1] * 4)
    got = np.asarray(attend(*arrays, step=step, sinks=jnp.full((HEADS, GROUP), sink, jnp.float32)))
    want = np.asarray(attend(*arrays, step=step)) if sink < 0 else np.zeros_like(got)
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_the_reference_is_always_there():
    assert "reference" in BACKENDS
