"""Embedding and head, with the vocabulary sharded over the whole mesh."""

import jax
import jax.numpy as jnp

from jaxwafer.ops.operations import Operations
from jaxwafer.quant.array import QuantizedArray, dequantize


def embed(table: QuantizedArray, offset: jax.Array, tokens: jax.Array, hidden: int, dtype,
          ops: Operations) -> jax.Array:  # fmt: skip
    """This shard's part of the embeddings of tokens [...]: [..., hidden], zero for tokens of other shards.

    table: [vocabulary rows of this shard, hidden]. offset: id of the first of them.
    """
    local = tokens - offset
    mine = (local >= 0) & (local < table.values.shape[0])
    rows = ops.lookup(table, jnp.where(mine, local, 0))
    return jnp.where(mine[..., None], dequantize(rows, dtype)[..., :hidden], jnp.zeros((), dtype))


def logits(hidden: jax.Array, weights: dict, offset: jax.Array, vocab: int, eps: float, ops: Operations) -> jax.Array:
    """This shard's logits of hidden [R, hidden]: float32 [R, rows of this shard], −inf beyond the vocabulary."""
    head = weights.get("head", weights["embedding"])
    (scores,) = ops.project(hidden, weights["final_norm"][None], [head[None]], 0, eps=eps)
    ids = offset + jnp.arange(scores.shape[-1], dtype=jnp.int32)
    return jnp.where((ids < vocab)[None], scores, -jnp.inf)
