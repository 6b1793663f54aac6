"""What a layer knows of the micro-batch it works on."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Step:
    """B requests, T tokens of each.

    start: int32 [B], position of the first token. count: int32 [B], how many of the T tokens are real; 0 is a pad row.
    table: int32 [B, blocks], KV blocks of each request, in order.
    """

    start: jax.Array
    count: jax.Array
    table: jax.Array

    def positions(self, tokens: int) -> jax.Array:
        """Position of each token, int32 [B, T]."""
        return self.start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]

    def rows(self, tokens: int, block: int, blocks: int, mine: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Block and offset of each token's KV row, int32 [B, T]; blocks of pad tokens, and all where not `mine` (bool
        scalar), lie beyond the cache's `blocks`."""
        position = self.positions(tokens)
        real = mine & (jnp.arange(tokens, dtype=jnp.int32)[None] < self.count[:, None])
        column = jnp.minimum(position // block, self.table.shape[1] - 1)
        owner = jnp.take_along_axis(self.table, column, axis=1)
        return jnp.where(real, owner, blocks), position % block
