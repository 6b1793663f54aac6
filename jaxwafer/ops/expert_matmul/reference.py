"""Plain JAX: one chosen expert after the other is dequantised and multiplied with all of its rows."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxwafer.model.mlp import Activation
from jaxwafer.ops.activation import activate
from jaxwafer.quant.array import QuantizedArray, dequantize
from jaxwafer.quant.formats import Format

# Most rows that are multiplied at a time.
TILE = 128


def objection(dtype, form: Format, platform: str) -> str | None:
    """Why this backend cannot run these inputs: never."""
    return None


def description(form: Format, quantise: bool) -> str:
    return "plain JAX"


def expert_matmul(x: jax.Array, weight: QuantizedArray, index: jax.Array, experts: jax.Array,
                  of: int, quantise: bool) -> jax.Array:  # fmt: skip
    """x: [R, K]. A matrix is rounded to the dtype of x before it is multiplied. Returns float32 [R, N]."""
    rows, count, outputs = x.shape[0], weight.values.shape[1], weight.values.shape[2]
    inputs = weight.values.shape[-1] * (2 if weight.format.packed else 1)
    tile = min(TILE, rows)
    owner = jnp.where((experts >= 0) & (experts < count), experts, count)
    order = jnp.argsort(owner, stable=True)
    owner = owner[order]
    # The last tile may reach past the rows.
    x = jnp.pad(x[order], ((0, tile), (0, inputs - x.shape[1])))
    ends = jnp.cumsum(jnp.zeros((count,), jnp.int32).at[owner].add(1, mode="drop"))

    def expert(carry):
        """All rows of the expert whose first row is `begin`."""
        begin, out = carry
        mine = owner[begin]
        matrix, end = dequantize(weight[index, mine], x.dtype), ends[mine]

        def multiply(carry):
            begin, out = carry
            part = jax.lax.dynamic_slice_in_dim(x, begin, tile)
            product = jnp.einsum("rk,nk->rn", part, matrix, preferred_element_type=jnp.float32, precision="highest")
            inside = begin + jnp.arange(tile, dtype=jnp.int32) < end
            product = jnp.where(inside[:, None], product, jnp.float32(0.0))
            # What a tile writes past the expert's rows the next expert, if there is one, writes again.
            return begin + tile, jax.lax.dynamic_update_slice_in_dim(out, product, begin, 0)

        return end, jax.lax.while_loop(lambda carry: carry[0] < end, multiply, (begin, out))[1]

    out = jnp.zeros((rows + tile, outputs), jnp.float32)
    _, out = jax.lax.while_loop(lambda carry: carry[0] < ends[-1], expert, (jnp.zeros((), jnp.int32), out))
    return jnp.zeros((rows, outputs), jnp.float32).at[order].set(out[:rows], unique_indices=True)


def gated(x: jax.Array, gate: QuantizedArray, up: QuantizedArray, index: jax.Array, experts: jax.Array,
          activation: Activation, of: int, quantise: bool, product: Callable = expert_matmul) -> jax.Array:  # fmt: skip
    """x: [X, K], of which each row has R / X of the experts in turn. product: any backend's `expert_matmul`. Returns
    float32 [R, N]."""
    rows = jnp.repeat(x, experts.shape[0] // max(1, x.shape[0]), axis=0)
    return activate(activation, *(product(rows, weight, index, experts, of, quantise) for weight in (gate, up)))
