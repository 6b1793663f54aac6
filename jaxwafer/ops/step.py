"""What a layer knows of the micro-batch it works on."""

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class Step:
    """B requests, T tokens of each.

    start: int32 [B], position of the first token. count: int32 [B], how many of the T tokens are real; 0 is a pad row.
    table: int32 [B, blocks], KV blocks of each request, in order. slot: int32 [B], the row of each request's state.
    """

    start: jax.Array
    count: jax.Array
    table: jax.Array
    slot: jax.Array

    def positions(self, tokens: int) -> jax.Array:
        """Position of each token, int32 [B, T]."""
        return self.start[:, None] + jnp.arange(tokens, dtype=jnp.int32)[None]

    def real(self, tokens: int) -> jax.Array:
        """Which tokens are not padding, bool [B, T]."""
        return jnp.arange(tokens, dtype=jnp.int32)[None] < self.count[:, None]

    def rows(self, tokens: int, block: int) -> tuple[jax.Array, jax.Array]:
        """Block and offset of each token's KV row, int32 [B, T]; the block of a pad token is −1."""
        position = self.positions(tokens)
        column = jnp.minimum(position // block, self.table.shape[1] - 1)
        owner = jnp.take_along_axis(self.table, column, axis=1)
        return jnp.where(self.real(tokens), owner, -1), position % block
