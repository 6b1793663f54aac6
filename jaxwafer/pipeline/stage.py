"""One stage: the layers of one wafer, run on one core's shard of a micro-batch.

Every device runs this same program on its own weights. Where all wafers have the same kind of layer in a slot the kind
is resolved here, in Python, and nothing branches; where they differ, or where a wafer may have nothing to do (`gated`),
the slot switches on the wafer's own stack index. Sums over cores stand between the branches, never inside one.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.layers.gqa import gqa
from jaxwafer.layers.mlp import dense_mlp
from jaxwafer.ops.operations import Operations
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


def run_stage(placement: Placement, weights: dict, tables: dict, cache: tuple, x: jax.Array, step: Step,
              ops: Operations, *, gated: bool) -> tuple[jax.Array, tuple]:  # fmt: skip
    """x [B, T, hidden] through this wafer's layers, and its caches, updated.

    weights, cache: this device's shards, without the wafer axis. tables: this wafer's rows of the slot tables, int32
    [slots]. gated: skip the layers' work where no row of the micro-batch is real.
    """
    busy = jnp.any(step.count > 0) if gated else None
    mixers, mlps = choices(placement.mixer_slots), choices(placement.mlp_slots)

    def mixer(stack: int) -> Callable:
        kind, stacked = placement.mixers[stack].kind, weights["mixers"][stack]

        def run(layer, x, cache):
            partial, fields = gqa(kind, stacked, layer, x, step, cache[stack], ops)
            return partial, (*cache[:stack], fields, *cache[stack + 1 :])

        return run

    def mlp(stack: int) -> Callable:
        kind, stacked = placement.mlps[stack].kind, weights["mlps"][stack]
        return lambda layer, x: dense_mlp(kind, stacked, layer, x, ops)

    def slot(which: int, index: jax.Array, x: jax.Array, cache: tuple) -> tuple[jax.Array, tuple]:
        partial, cache = dispatch(
            mixers[which], mixer, lambda layer, x, cache: (_zeros(x), cache),
            tables["mixer_stack"][index], busy, tables["mixer_position"][index], x, cache,
        )  # fmt: skip
        x = add(x, jax.lax.psum(partial, "core"))
        partial = dispatch(
            mlps[which], mlp, lambda layer, x: _zeros(x),
            tables["mlp_stack"][index], busy, tables["mlp_position"][index], x,
        )  # fmt: skip
        return add(x, jax.lax.psum(partial, "core")), cache

    for segment in segments(list(zip(mixers, mlps, strict=True))):

        def run(repeat, carry, segment=segment):
            for within in range(segment.period):
                index = jnp.asarray(segment.start + within + repeat * segment.period, jnp.int32)
                carry = slot(segment.start + within, index, *carry)
            return carry

        x, cache = run(0, (x, cache)) if segment.repeats == 1 else jax.lax.fori_loop(0, segment.repeats, run, (x, cache))
    return x, cache


def dispatch(stacks: tuple[int, ...], branch: Callable, empty: Callable, stack: jax.Array, busy: jax.Array | None,
             *operands):  # fmt: skip
    """The branch of this wafer's stack, or `empty` where the slot is empty or the wafer is not busy."""
    present = [s for s in stacks if s >= 0]
    if not present:
        return empty(*operands)
    if len(stacks) == 1 and busy is None:
        return branch(stacks[0])(*operands)
    which = jnp.searchsorted(jnp.asarray(present, jnp.int32), stack).astype(jnp.int32)
    idle = (stack < 0) if busy is None else (stack < 0) | ~busy
    return jax.lax.switch(jnp.where(idle, len(present), which), [*map(branch, present), empty], *operands)


def add(x: jax.Array, update: jax.Array) -> jax.Array:
    return (x.astype(jnp.float32) + update).astype(x.dtype)


def _zeros(x: jax.Array) -> jax.Array:
    return jnp.zeros(x.shape, jnp.float32)
