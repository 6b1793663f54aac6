"""Pallas kernel for a step on TPUs: the state of some heads of a request comes into fast memory, and goes back changed.

Each is read once and written once, where it lies. More tokens go in chunks, in plain JAX.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.delta_rule import reference
from jaxwafer.ops.main_memory import in_main_memory, in_order
from jaxwafer.ops.state import State

# Heads of a grid step, where they are a multiple of it.
HEADS = 8
# What a grid step does: give the state back as it came, take a step, or leave what the one before it made.
PASS, STEP, LEAVE = range(3)


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs, or None."""
    return None if platform == "tpu" else f"not made for {platform}"


def description() -> str:
    return "Pallas kernel for a step, plain JAX for prompts"


def recur(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: State, layer: jax.Array,
          slot: jax.Array, start: jax.Array) -> tuple[jax.Array, State]:  # fmt: skip
    if q.shape[1] != 1:
        return reference.recur(q, k, v, g, beta, state, layer, slot, start)
    stored, vectors = in_order(state.values, range(5)), [x[:, 0] for x in (q, k, v, g, beta[..., None])]
    batch, heads, width = vectors[2].shape
    tile = heads if heads % HEADS else HEADS
    row, act = _rows(slot)
    scalars = (jnp.asarray(layer, jnp.int32).reshape(1), row, act, start)

    def of_request(h, b, *scalars):
        return b, h, 0

    kept = pl.BlockSpec((None, None, tile, *stored.shape[3:]), lambda h, b, layer, row, *s: (layer[0], row[b], h, 0, 0))
    call = pl.pallas_call(
        _kernel,
        out_shape=[jax.ShapeDtypeStruct((batch, heads, width), jnp.float32), pltpu.HBM(stored.shape, stored.dtype)],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(heads // tile, batch),
            in_specs=[*(pl.BlockSpec((None, tile, x.shape[2]), of_request) for x in vectors), kept],
            out_specs=[pl.BlockSpec((None, tile, width), of_request), kept],
        ),
        input_output_aliases={len(scalars) + len(vectors): 1},
        cost_estimate=pl.CostEstimate(
            flops=7 * batch * heads * stored.shape[3] * width,
            transcendentals=vectors[3].size,
            bytes_accessed=4 * batch * heads * (2 * stored.shape[3] * width + width) + sum(4 * x.size for x in vectors),
        ),
    )
    out, values = call(*scalars, *vectors, in_main_memory(stored))
    return out[:, None], State(values=in_order(values, range(5)))


def _rows(slot: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The row of the state that is in fast memory at each request's turn, and what becomes of it, int32 [B].

    At the turn of a request without a slot it is that of the one before it that has one, or else of the first that has:
    a row comes in and goes out once.
    """
    turn = jnp.arange(len(slot), dtype=jnp.int32)
    before = jax.lax.cummax(jnp.where(slot >= 0, turn, -1))
    owner = jnp.where(before >= 0, before, jnp.argmax(slot >= 0).astype(jnp.int32))
    act = jnp.where(slot >= 0, STEP, jnp.where(before >= 0, LEAVE, PASS))
    return jnp.maximum(slot[owner], 0), act


def _kernel(layer, row, act, start, q, k, v, g, beta, before, out, after):
    """Some heads of one request: vectors [heads, K], [heads, V] and [heads, 1], states [heads, K, V]."""
    b = pl.program_id(1)

    @pl.when(act[b] == STEP)
    def _():
        state = jnp.where(start[b] == 0, 0.0, before[...]) * jnp.exp(g[...])[..., None]
        key = k[...][..., None]
        update = beta[...] * (v[...] - jnp.sum(state * key, axis=1))
        state = state + key * update[:, None]
        after[...] = state
        out[...] = jnp.sum(state * q[...][..., None], axis=1)

    @pl.when(act[b] != STEP)
    def _():
        out[...] = jnp.zeros(out.shape, out.dtype)

    @pl.when(act[b] == PASS)
    def _():
        after[...] = before[...]
