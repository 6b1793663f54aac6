"""What every tick does on every device, in decoding and in prefill alike: enter, run the stage, leave, hop."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.layers import vocab
from jaxwafer.ops.collective import psum
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.step import Step
from jaxwafer.partition.placement import Placement
from jaxwafer.pipeline.stage import Stage

AXES = ("wafer", "core")


@dataclass(frozen=True)
class Pipeline:
    """The static part of a program. dtype: of the residual stream and the activations."""

    placement: Placement
    ops: Operations
    dtype: jnp.dtype

    def tables(self) -> dict[str, np.ndarray]:
        """The slot tables, int32 [wafers, slots], an input of every program sharded over wafers."""
        mixer, mlp = self.placement.mixer_slots, self.placement.mlp_slots
        return {
            "mixer_stack": mixer.stack,
            "mixer_position": mixer.position,
            "mlp_stack": mlp.stack,
            "mlp_position": mlp.position,
        }

    def wafer(self) -> jax.Array:
        return jax.lax.axis_index("wafer").astype(jnp.int32)

    def enter(self, weights: dict, tokens: jax.Array, hopped: jax.Array) -> jax.Array:
        """x for this wafer's stage: the embedded tokens int32 [B, T] on the first wafer, elsewhere what hopped in."""
        table = weights["globals"]["embedding"]
        part = vocab.embed(table, self._offset(table), tokens, self.placement.spec.hidden, self.dtype)
        return jnp.where(self.wafer() == 0, psum(part, *AXES), hopped)

    def stage(self, weights: dict, tables: dict, cache: tuple, x: jax.Array, step: Step, *, gated: bool):
        """x, the cache and the experts touched after this wafer's layers."""
        return Stage(self.placement, self.ops, weights, tables, gated).run(cache, x, step)

    def leave(self, weights: dict, hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Logits of the last wafer's hidden [R, hidden]: this shard's float32 [R, rows], and its first row's id."""
        last = self.wafer() == self.placement.wafers - 1
        hidden = psum(jnp.where(last, hidden, jnp.zeros((), hidden.dtype)), "wafer")
        spec, weights = self.placement.spec, weights["globals"]
        offset = self._offset(weights.get("head", weights["embedding"]))
        return vocab.logits(hidden, weights, offset, spec.vocab, spec.eps, self.ops), offset

    def hop(self, tree):
        """Send to the next wafer; what leaves the last one arrives at the first, which does not read it."""
        wafers = self.placement.wafers
        if wafers == 1:
            return tree
        ring = [(w, (w + 1) % wafers) for w in range(wafers)]
        return jax.tree.map(lambda leaf: jax.lax.ppermute(leaf, "wafer", ring), tree)

    def _offset(self, table) -> jax.Array:
        """Id of the first vocabulary row of this device's shard."""
        shard = self.wafer() * self.placement.cores + jax.lax.axis_index("core").astype(jnp.int32)
        return shard * table.values.shape[0]


def local(tree):
    """A device's shard without the wafer axis of length 1."""
    return jax.tree.map(lambda leaf: leaf[0], tree)


def stacked(tree):
    """Inverse of `local`."""
    return jax.tree.map(lambda leaf: leaf[None], tree)


def layers_local(weights: dict) -> dict:
    return {"globals": weights["globals"], "mixers": local(weights["mixers"]), "mlps": local(weights["mlps"])}
