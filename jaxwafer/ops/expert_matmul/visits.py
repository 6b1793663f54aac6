"""Rows by expert, and the visits of a kernel to them: how many there are at most is known, how many each expert has is
not."""

import jax
import jax.numpy as jnp


def owners(experts: jax.Array, held: int) -> jax.Array:
    """Experts of rows, int32 [R], with `held` for those outside 0 … held − 1."""
    return jnp.where((experts >= 0) & (experts < held), experts, held)


def ranges(owner: jax.Array, held: int) -> tuple[jax.Array, jax.Array]:
    """Where the rows of each expert begin and end once rows are sorted by `owner` [R], int32 [held] each."""
    number = jnp.zeros((held,), jnp.int32).at[owner].add(1, mode="drop")
    end = jnp.cumsum(number)
    return end - number, end


def share_out(each: jax.Array, most: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of `most` visits, where expert e has each[e] in turn: the expert, which of its visits it is, int32 [most] each,
    and whether it is one at all; those too many name the last once more."""
    upto = jnp.cumsum(each)
    visit = jnp.arange(most, dtype=jnp.int32)
    last = jnp.minimum(visit, jnp.maximum(upto[-1] - 1, 0))
    expert = jnp.sum((upto[None] <= last[:, None]).astype(jnp.int32), axis=1)
    expert = jnp.minimum(expert, each.shape[0] - 1)
    return expert, last - (upto - each)[expert], visit < upto[-1]
