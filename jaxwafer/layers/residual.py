"""The residual stream: a plain sum, or Kimi K3's sum beside finished blocks.

A stream is a pytree that hops from wafer to wafer. `Plain` keeps x [B, T, hidden]; `Blocks` keeps the running sum and
the finished blocks [blocks, B, T, hidden]. All is replicated over cores, so nothing here communicates.
"""

from dataclasses import dataclass

import flax.struct
import jax
import jax.numpy as jnp

from jaxwafer.model.residual import BlockResidual


class Plain:
    """Every layer reads the sum and adds to it."""

    def begin(self, embedded: jax.Array) -> jax.Array:
        return embedded

    def mixer_input(self, stream, weights: dict, layer: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """What the mixer of layer `number` reads, and the stream its output is added to."""
        return stream, stream

    def mlp_input(self, stream, weights: dict, layer: jax.Array, number: jax.Array) -> jax.Array:
        return stream

    def add(self, stream, update: jax.Array):
        """The stream with a float32 update, in the stream's dtype."""
        return add(stream, update)

    def end(self, stream, weights: dict) -> jax.Array:
        """What the final norm reads."""
        return stream


@flax.struct.dataclass
class BlockStream:
    """total: [B, T, hidden]. blocks: [blocks, B, T, hidden], of which those finished before the layer at hand count."""

    total: jax.Array
    blocks: jax.Array


@dataclass(frozen=True)
class Blocks:
    """Layer L first mixes; then, if L divides by `every`, the sum becomes a block and starts anew."""

    kind: BlockResidual

    def begin(self, embedded: jax.Array) -> BlockStream:
        return BlockStream(total=embedded, blocks=jnp.zeros((self.kind.blocks, *embedded.shape), embedded.dtype))

    def mixer_input(self, stream: BlockStream, weights: dict, layer: jax.Array, number: jax.Array):
        every = self.kind.every
        finished = (number + every - 1) // every
        x = self._mix(stream, weights["self_attention_norm"][layer], weights["self_attention_proj"][layer], finished)
        # An empty slot has number −1 and changes nothing.
        closes = (number >= 0) & (number % every == 0)
        place = jnp.where(closes, number // every, self.kind.blocks)
        blocks = stream.blocks.at[place].set(stream.total, mode="drop")
        total = jnp.where(closes, jnp.zeros((), stream.total.dtype), stream.total)
        return x, BlockStream(total=total, blocks=blocks)

    def mlp_input(self, stream: BlockStream, weights: dict, layer: jax.Array, number: jax.Array) -> jax.Array:
        return self._mix(stream, weights["mlp_norm"][layer], weights["mlp_proj"][layer], number // self.kind.every + 1)

    def add(self, stream: BlockStream, update: jax.Array) -> BlockStream:
        return stream.replace(total=add(stream.total, update))

    def end(self, stream: BlockStream, weights: dict) -> jax.Array:
        finished = jnp.asarray(self.kind.blocks, jnp.int32)
        return self._mix(stream, weights["output_norm"], weights["output_proj"], finished)

    def _mix(self, stream: BlockStream, norm: jax.Array, proj: jax.Array, finished: jax.Array) -> jax.Array:
        """Σ softmax(rmsnorm(V)·(norm ⊙ proj))·V over V = the first `finished` blocks and the sum. norm: [hidden], proj:
        [1, hidden]. With no block yet it is the sum itself."""
        rows = jnp.concatenate([stream.blocks, stream.total[None]]).astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(rows), axis=-1) + self.kind.eps)
        score = jnp.einsum("nbth,h->nbt", rows, norm * proj[0], precision="highest") * scale
        row = jnp.arange(len(rows), dtype=jnp.int32)
        counts = (row < finished) | (row == len(rows) - 1)
        weight = jax.nn.softmax(jnp.where(counts[:, None, None], score, -jnp.inf), axis=0)
        return jnp.einsum("nbt,nbth->bth", weight, rows, precision="highest").astype(stream.total.dtype)


def residual(kind: BlockResidual | None) -> Plain | Blocks:
    return Blocks(kind) if kind else Plain()


def add(x: jax.Array, update: jax.Array) -> jax.Array:
    """x plus a float32 update, in x's dtype."""
    return (x.astype(jnp.float32) + update).astype(x.dtype)
