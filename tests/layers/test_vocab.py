"""Embedding and head on one shard of the vocabulary."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.layers import vocab
from jaxwafer.ops.operations import Operations
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.convert import dequantize, quantize
from jaxwafer.quant.formats import FORMATS

VOCAB, HIDDEN, SHARDS, ROWS = 10, 48, 3, 4  # 12 stored rows, the last two of them padding


def table(form: str) -> tuple[np.ndarray, list[QuantizedArray]]:
    """The values, and the shards."""
    full = np.zeros((SHARDS * ROWS, HIDDEN), np.float32)
    full[:VOCAB] = np.random.default_rng(0).standard_normal((VOCAB, HIDDEN))
    stored = quantize(full, FORMATS[form])
    parts = [
        QuantizedArray(*(None if p is None else jnp.asarray(p[s * ROWS : (s + 1) * ROWS])
                         for p in (stored.values, stored.scale, stored.minimum)), format=stored.format)
        for s in range(SHARDS)
    ]  # fmt: skip
    return dequantize(stored)[:, :HIDDEN], parts


@pytest.mark.parametrize("form", ["f32", "int4", "int8", "int4-min"])
def test_each_token_is_embedded_by_one_shard_and_the_sum_is_its_row(form):
    values, shards = table(form)
    tokens = np.array([[0, 3, 4], [9, 8, 0]])
    embed = jax.jit(partial(vocab.embed, hidden=HIDDEN, dtype=jnp.float32, ops=Operations("cpu")))
    parts = [np.asarray(embed(t, jnp.int32(s * ROWS), jnp.asarray(tokens, jnp.int32))) for s, t in enumerate(shards)]
    for s, part in enumerate(parts):
        assert not part[tokens // ROWS != s].any()
    np.testing.assert_array_equal(sum(parts), values[tokens])


@pytest.mark.parametrize("tied", [True, False])
def test_logits_of_a_shard_are_its_rows_and_rows_beyond_the_vocabulary_are_minus_infinity(tied):
    values, shards = table("f32")
    hidden = np.random.default_rng(1).standard_normal((2, HIDDEN)).astype(np.float32)
    norm = np.random.default_rng(2).standard_normal(HIDDEN).astype(np.float32)
    logits = jax.jit(partial(vocab.logits, vocab=VOCAB, eps=1e-5, ops=Operations("cpu")))
    got = []
    for s, shard in enumerate(shards):
        weights = {"final_norm": jnp.asarray(norm)}
        weights |= {"embedding": shard} if tied else {"head": shard, "embedding": shards[0]}
        got.append(np.asarray(logits(hidden, weights, jnp.int32(s * ROWS))))
    got = np.concatenate(got, -1)
    normed = hidden / np.sqrt(np.mean(hidden.astype(np.float64) ** 2, -1, keepdims=True) + 1e-5) * norm
    np.testing.assert_allclose(got[:, :VOCAB], normed @ values[:VOCAB].T, rtol=1e-4, atol=1e-4)
    assert np.all(got[:, VOCAB:] == -np.inf)
