"""Prefill: prompts in chunks through the same stages, chunk after chunk, each a micro-batch of one request."""

import flax.struct
import jax
import jax.numpy as jnp

from jaxwafer.ops.collective import spanned
from jaxwafer.ops.sampling.api import SamplingState, logprob, sample
from jaxwafer.ops.step import Step
from jaxwafer.pipeline.tick import AXES, Pipeline, layers_local, local


@flax.struct.dataclass
class Chunks:
    """N chunks of T tokens in the order they enter: a request's chunks in the order of its text.

    tokens, targets: int32 [N, T]; targets (the token that follows each, for scoring) may be None. start, count,
    slot: int32 [N], position of the first token, how many are real, and the row of the request's state. table: int32
    [N, blocks]. sampling: parameters [N].
    """

    tokens: jax.Array
    targets: jax.Array | None
    start: jax.Array
    count: jax.Array
    table: jax.Array
    slot: jax.Array
    sampling: SamplingState


def prefill(pipeline: Pipeline, weights: dict, tables: dict, cache: tuple, chunks: Chunks, number: jax.Array, *,
            gated: bool, filters: bool):  # fmt: skip
    """The first `number` chunks, inside shard_map: N + wafers − 1 ticks, at each of which wafer w runs chunk t − w.

    Returns (cache, result): the token sampled after each chunk, int32 [N], or where there are targets their log
    probabilities, float32 [N, T].
    """
    wafers = pipeline.placement.wafers
    weights, tables = layers_local(weights), local(tables)
    limit, length = chunks.tokens.shape
    wafer = pipeline.wafer()

    def row(array, index):
        return jax.lax.dynamic_slice_in_dim(array, jnp.clip(index, 0, limit - 1), 1, axis=0)

    def tick(t, carry):
        cache, x, result = carry
        here, last = t - wafer, t - (wafers - 1)
        x = pipeline.enter(weights, row(chunks.tokens, t), x)
        real = (here >= 0) & (here < number)
        step = Step(
            start=row(chunks.start, here),
            count=jnp.where(real, row(chunks.count, here), 0),
            table=row(chunks.table, here),
            slot=row(chunks.slot, here),
        )
        x, cache, _ = pipeline.stage(weights, tables, cache, x, step, gated=gated)
        # A scatter wraps a negative index, so a chunk that is not there yet must get one past the end.
        slot = jnp.where(last >= 0, last, limit)
        if chunks.targets is None:
            end = row(chunks.count, last) - 1
            scores, offset = pipeline.leave(weights, jax.lax.dynamic_index_in_dim(x[0], end[0], 0))
            params = jax.tree.map(lambda leaf: row(leaf, last), chunks.sampling)
            position = row(chunks.start, last) + end + 1
            token = sample(scores, offset, params, position, axes=spanned(*AXES), filters=filters)
            result = result.at[slot].set(token[0], mode="drop")
        else:
            scores, offset = pipeline.leave(weights, x[0])
            values = logprob(scores, offset, row(chunks.targets, last)[0], axes=spanned(*AXES))
            result = result.at[slot].set(values, mode="drop")
        return cache, pipeline.hop(x), result

    x = jnp.zeros((1, length, pipeline.placement.spec.hidden), pipeline.dtype)
    result = jnp.zeros((limit,), jnp.int32) if chunks.targets is None else jnp.zeros((limit, length), jnp.float32)
    cache, _, result = jax.lax.fori_loop(0, number + wafers - 1, tick, (cache, x, result))
    return cache, result
