"""One stage: the layers of one wafer, run on one core's shard of a micro-batch.

Every device runs this same program on its own weights. Where all wafers have the same kind of layer in a slot the kind
is resolved here, in Python, and nothing branches; where they differ, or where a wafer may have nothing to do (`gated`),
the slot switches on the wafer's own stack index. Sums over cores stand between the branches, never inside one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.layers import gqa
from jaxwafer.layers.mlp import dense_mlp
from jaxwafer.ops.collective import psum
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.pages import append
from jaxwafer.ops.step import Step
from jaxwafer.partition.placement import Placement, SlotTable


@dataclass(frozen=True)
class Segment:
    """`repeats` runs of `period` slots with the same pattern of kinds: unrolled once, looped over."""

    start: int
    period: int
    repeats: int


def segments(pattern: Sequence, longest: int = 8) -> list[Segment]:
    """Cut a pattern of slots into repeating segments, each the one that covers most slots with a period ≤ `longest`.

    >>> segments("aaab")
    [Segment(start=0, period=1, repeats=3), Segment(start=3, period=1, repeats=1)]
    """
    found, start = [], 0
    while start < len(pattern):
        best = Segment(start, 1, 1)
        for period in range(1, min(longest, len(pattern) - start) + 1):
            unit = pattern[start : start + period]
            repeats = 1
            while pattern[start + repeats * period : start + (repeats + 1) * period] == unit:
                repeats += 1
            if repeats > 1 and repeats * period > best.period * best.repeats:
                best = Segment(start, period, repeats)
        found.append(best)
        start += best.period * best.repeats
    return found


def choices(table: SlotTable) -> list[tuple[int, ...]]:
    """For each slot the stacks (−1: empty) that any wafer has there, sorted."""
    return [tuple(sorted(set(column.tolist()))) for column in np.moveaxis(table.stack, 1, 0)]


@dataclass(frozen=True)
class Stage:
    """The layers of one wafer, on one core's shards.

    weights, cache: without the wafer axis. tables: this wafer's rows of the slot tables, int32 [slots]. gated: skip the
    work of a micro-batch of pad rows alone.
    """

    placement: Placement
    ops: Operations
    weights: dict
    tables: dict[str, jax.Array]
    gated: bool

    def run(self, cache: tuple, x: jax.Array, step: Step) -> tuple[jax.Array, tuple]:
        """x [B, T, hidden] after the layers, and the caches with its tokens in them."""
        mixers, mlps = choices(self.placement.mixer_slots), choices(self.placement.mlp_slots)
        for segment in segments(list(zip(mixers, mlps, strict=True))):

            def repeat(number, carry, segment=segment):
                for within in range(segment.period):
                    slot = jnp.asarray(segment.start + within + number * segment.period, jnp.int32)
                    x, cache = self._mixer(mixers[segment.start + within], slot, *carry, step)
                    carry = self._mlp(mlps[segment.start + within], slot, x, step), cache
                return carry

            once = segment.repeats == 1
            x, cache = repeat(0, (x, cache)) if once else jax.lax.fori_loop(0, segment.repeats, repeat, (x, cache))
        return x, cache

    def _mixer(self, stacks: tuple[int, ...], slot: jax.Array, x: jax.Array, cache: tuple, step: Step):
        """x and the caches after the mixer in a slot where wafers have `stacks`.

        The caches are written between the branches: a cache that went through one would be copied.
        """
        here, layer = self.tables["mixer_stack"][slot], self.tables["mixer_position"][slot]
        kinds = {s: (self.placement.mixers[s].kind, self.weights["mixers"][s]) for s in stacks if s >= 0}
        projected = self._switch(
            stacks,
            here,
            step,
            {s: partial(gqa.project, *kind, ops=self.ops) for s, kind in kinds.items()},
            layer,
            x,
            step,
        )
        caches = list(cache)
        for s, (_, rows) in projected.items():
            mine = jnp.asarray(True) if len(stacks) == 1 else here == s
            for name, pages in caches[s].items():
                block, offset = step.rows(x.shape[1], pages.block, pages.blocks, mine)
                caches[s] = caches[s] | {name: append(pages, layer, block, offset, rows[name])}
        attended = self._switch(
            stacks, here, step,
            {s: partial(self._attend, s, *kind) for s, kind in kinds.items()}, layer, projected, caches, step,
        )  # fmt: skip
        return add(x, psum(total(attended, x), "core")), tuple(caches)

    def _attend(self, stack: int, kind, weights, layer, projected, caches, step):
        return gqa.attend(kind, weights, layer, projected[stack][0], caches[stack], step, self.ops)

    def _mlp(self, stacks: tuple[int, ...], slot: jax.Array, x: jax.Array, step: Step) -> jax.Array:
        here, layer = self.tables["mlp_stack"][slot], self.tables["mlp_position"][slot]
        kinds = {s: (self.placement.mlps[s].kind, self.weights["mlps"][s]) for s in stacks if s >= 0}
        branches = {s: partial(dense_mlp, *kind, ops=self.ops) for s, kind in kinds.items()}
        return add(x, psum(total(self._switch(stacks, here, step, branches, layer, x), x), "core"))

    def _switch(
        self, stacks: tuple[int, ...], here: jax.Array, step: Step, branches: dict[int, Callable], *operands
    ) -> dict:
        """{stack: result} of the branch of the stack that this wafer has here; the others' results are zeros."""
        if len(stacks) == 1 and not self.gated:
            return {s: branch(*operands) for s, branch in branches.items()}
        shapes = {s: jax.eval_shape(branch, *operands) for s, branch in branches.items()}

        def only(chosen: int | None) -> Callable:
            def run(*operands):
                return {s: branches[s](*operands) if s == chosen else zeros(shapes[s]) for s in branches}

            return run

        index = sum((here > s).astype(jnp.int32) for s in branches) if branches else jnp.zeros((), jnp.int32)
        idle = here < 0
        if self.gated:
            idle |= ~jnp.any(step.count > 0)
        return jax.lax.switch(jnp.where(idle, len(branches), index), [*map(only, branches), only(None)], *operands)


def zeros(shapes):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def total(partials: dict[int, jax.Array], x: jax.Array) -> jax.Array:
    """The sum of every stack's partial sum; zero where a slot is empty on all wafers."""
    return sum(partials.values(), jnp.zeros(x.shape, jnp.float32))


def add(x: jax.Array, update: jax.Array) -> jax.Array:
    """The residual stream x with a float32 update, in x's dtype."""
    return (x.astype(jnp.float32) + update).astype(x.dtype)
