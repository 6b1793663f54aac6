"""Plain JAX: one chosen expert after the other is dequantised and multiplied with all of its rows."""

import jax
import jax.numpy as jnp

from jaxwafer.quant.array import QuantizedArray, dequantize

# Most rows that are multiplied at a time.
TILE = 128


def objection(dtype, weight_format: str, platform: str) -> str | None:
    """Why this backend cannot run these inputs: never."""
    return None


def description() -> str:
    return "plain JAX"


def expert_matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array, experts: jax.Array) -> jax.Array:
    """x: [R, K]. A matrix is rounded to the dtype of x before it is multiplied. Returns float32 [R, N]."""
    rows, count, outputs = x.shape[0], weight.values.shape[1], weight.values.shape[2]
    tile = min(TILE, rows)
    owner = jnp.where((experts >= 0) & (experts < count), experts, count)
    order = jnp.argsort(owner, stable=True)
    # Rows of expert e: ends[e − 1] … ends[e] of the sorted ones.
    sizes = jnp.zeros((count,), jnp.int32).at[owner].add(1, mode="drop")
    ends = jnp.cumsum(sizes)
    live = jnp.argsort(sizes == 0, stable=True)
    # The last tile of the last expert may reach past the rows.
    inputs = weight.values.shape[-1] * (2 if weight.format.packed else 1)
    sorted_x = jnp.pad(x[order], ((0, tile), (0, inputs - x.shape[1])))

    def expert(number, out):
        e = live[number]
        matrix = dequantize(weight[index, e], x.dtype)

        def rows_of(state):
            begin, out = state
            part = jax.lax.dynamic_slice_in_dim(sorted_x, begin, tile)
            product = jnp.einsum("rk,nk->rn", part, matrix, preferred_element_type=jnp.float32, precision="highest")
            mine = begin + jnp.arange(tile, dtype=jnp.int32) < ends[e]
            product = jnp.where(mine[:, None], product, jax.lax.dynamic_slice_in_dim(out, begin, tile))
            return begin + tile, jax.lax.dynamic_update_slice_in_dim(out, product, begin, 0)

        return jax.lax.while_loop(lambda state: state[0] < ends[e], rows_of, (ends[e] - sizes[e], out))[1]

    out = jax.lax.fori_loop(0, jnp.sum(sizes > 0), expert, jnp.zeros((rows + tile, outputs), jnp.float32))
    return jnp.zeros((rows, outputs), jnp.float32).at[order].set(out[:rows], unique_indices=True)
