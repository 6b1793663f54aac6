"""Recurrent state of requests: read and write rows of a stack of layers."""

import flax.struct
import jax
import jax.numpy as jnp

from jaxwafer.ops.bits import from_bits, to_bits


@flax.struct.dataclass
class State:
    """values: [layers, rows, …], a row for every slot a request can have, stored as `ops.bits` says."""

    values: jax.Array


def read_state(state: State, layer: jax.Array, slot: jax.Array, start: jax.Array) -> jax.Array:
    """The state of requests, float32 [B, …], zero for those at their first token. slot, start: int32 [B]."""
    rows = from_bits(state.values[layer, slot]).astype(jnp.float32)
    return jnp.where((start == 0).reshape(-1, *(1,) * (rows.ndim - 1)), 0.0, rows)


def write_state(state: State, layer: jax.Array, slot: jax.Array, rows: jax.Array) -> State:
    """Write rows [B, …] at slots int32 [B], in the state's numbers; a negative slot is dropped."""
    # A scatter drops what lies past the end but wraps what is negative.
    slot = jnp.where(slot < 0, state.values.shape[1], slot)
    return State(values=state.values.at[layer, slot].set(to_bits(rows, state.values.dtype), mode="drop"))
