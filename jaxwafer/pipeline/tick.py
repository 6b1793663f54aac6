"""What every tick does on every device, in decoding and in prefill alike: enter, run the stage, leave, hop."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.layers import vocab
from jaxwafer.layers.residual import Blocks, Plain, residual
from jaxwafer.ops.collective import psum
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.step import Step
from jaxwafer.partition.placement import Placement
from jaxwafer.partition.schedule import Schedule
from jaxwafer.pipeline.stage import Stage

AXES = ("wafer", "core")


@dataclass(frozen=True)
class Pipeline:
    """The static part of a program. dtype: of the residual stream and the activations. unroll, only, streamed: as
    `Stage` has them."""

    placement: Placement
    ops: Operations
    dtype: jnp.dtype
    unroll: bool = False
    only: str | None = None
    streamed: bool = False

    @property
    def schedule(self) -> Schedule:
        return self.placement.schedule

    @property
    def residual(self) -> Plain | Blocks:
        return residual(self.placement.spec.residual)

    def tables(self) -> tuple[dict[str, np.ndarray], ...]:
        """For each phase what a wafer must know, an input of every program sharded over wafers.

        int32 [wafers, slots]: stack and position of each slot's mixer and MLP, its layer's number, and the layer's
        place on the wafer. int32 [wafers]: lag, rounds since the micro-batch entered; inbox, the phase that what
        arrives is for.
        """
        found = []
        for number, phase in enumerate(self.placement.phases):
            place = np.zeros_like(phase.layer)
            for (wafer, slot), layer in np.ndenumerate(phase.layer):
                if layer >= 0:
                    place[wafer, slot] = self.placement.partition.layers[wafer].index(layer)
            found.append({
                "mixer_stack": phase.mixer.stack, "mixer_position": phase.mixer.position,
                "mlp_stack": phase.mlp.stack, "mlp_position": phase.mlp.position,
                "layer": phase.layer, "place": place,
                "lag": self.schedule.lags(number), "inbox": self.schedule.inbox(number),
            })  # fmt: skip
        return tuple(found)

    def wafer(self) -> jax.Array:
        return jax.lax.axis_index("wafer").astype(jnp.int32)

    def embed(self, weights: dict, tokens: jax.Array):
        """The residual stream of tokens int32 [B, T], the same on all devices."""
        table = weights["globals"]["embedding"]
        part = vocab.embed(table, self._offset(table), tokens, self.placement.spec.hidden, self.dtype, self.ops)
        return self.residual.begin(psum(part, *AXES))

    def entered(self, tree, held):
        """On the wafer of the first visit the tree that enters, elsewhere what the wafer held."""
        first = self.wafer() == self.schedule.entry
        return jax.tree.map(lambda new, old: jnp.where(first, new, old), tree, held)

    @staticmethod
    def opened(boxes, phase: int):
        """What arrived for a phase."""
        return jax.tree.map(lambda leaf: leaf[phase], boxes)

    def blank(self, batch: int, tokens: int):
        """A stream of zeros."""
        return self.residual.begin(jnp.zeros((batch, tokens, self.placement.spec.hidden), self.dtype))

    def stage(self, phase: int, weights: dict, tables: tuple, cache: tuple, stream, step: Step, *, gated: bool):
        """The stream, the cache and the experts touched after this wafer's layers of a phase."""
        # Wafers without a visit in this phase have nothing to do, as those that hold pad rows.
        stage = Stage(
            self.placement, self.placement.phases[phase], self.ops, weights, tables[phase], gated, self.unroll,
            self.only, self.streamed,
        )  # fmt: skip
        return stage.run(cache, stream, step)

    def leave(self, weights: dict, stream, take) -> tuple[jax.Array, jax.Array]:
        """Logits of the last visit's stream: this shard's float32 [R, rows], and its first row's id.

        take: of what the final norm reads, [B, T, hidden], the rows [R, hidden] wanted.
        """
        hidden = take(self.residual.end(stream, weights["globals"]))
        last = self.wafer() == self.schedule.exit[0]
        hidden = psum(jnp.where(last, hidden, jnp.zeros((), hidden.dtype)), "wafer")
        spec, weights = self.placement.spec, weights["globals"]
        offset = self._offset(weights.get("head", weights["embedding"]))
        return vocab.logits(hidden, weights, offset, spec.vocab, spec.eps, self.ops), offset

    def hop(self, phase: int, tables: tuple, boxes, tree):
        """Send a tree to the wafer of the next visit, into the box of the phase that will run it.

        boxes: the tree with a leading axis of phases. Where nothing arrives no box changes.
        """
        hops = self.schedule.hops(phase)
        box = tables[phase]["inbox"]

        def move(boxes, leaf):
            arrived = jax.lax.ppermute(leaf, "wafer", hops) if any(a != b for a, b in hops) else leaf
            return boxes.at[box].set(arrived, mode="drop")

        return jax.tree.map(move, boxes, tree) if hops else boxes

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
    return {name: part if name == "globals" else local(part) for name, part in weights.items()}
