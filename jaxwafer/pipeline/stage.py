"""One stage: the layers of one wafer, run on one core's shard of a micro-batch.

Every device runs this same program on its own weights. Where all wafers have the same kind of layer in a slot the kind
is resolved here, in Python, and nothing branches; where they differ, or where a wafer may have nothing to do (`gated`),
the slot switches on the wafer's own stack index. Sums over cores stand between the branches, never inside one.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.layers import mixers, mlps
from jaxwafer.layers.residual import Blocks, Plain, residual
from jaxwafer.ops.collective import psum
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.step import Step
from jaxwafer.partition.placement import Phase, Placement, SlotTable
from jaxwafer.pipeline.stream import BroughtOperations, bring, brought


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
    """The layers that one wafer runs in one phase, on one core's shards.

    weights: without the wafer axis. tables: this wafer's rows of the phase's slot tables, int32 [slots]. gated:
    skip the work of a micro-batch of pad rows alone. unroll: loop over no layers, whatever the compile takes. only:
    "mixers" or "mlps" leaves the others out, to tell by the difference what XLA says of each. streamed: the layers'
    weights are in host memory.
    """

    placement: Placement
    phase: Phase
    ops: Operations
    weights: dict
    tables: dict[str, jax.Array]
    gated: bool
    unroll: bool = False
    only: str | None = None
    streamed: bool = False

    def run(self, cache: tuple, stream, step: Step):
        """The stream after the layers, the caches with its tokens in them, and touched: float32 [MLP stacks], how many
        experts' weights this core read in each stack."""
        pairs = list(zip(choices(self.phase.mixer), choices(self.phase.mlp), strict=True))
        if self.streamed:
            return self._run_streamed(pairs, cache, stream, step)
        carry = stream, cache, jnp.zeros((len(self.placement.mlps),), jnp.float32)
        for segment in segments(pairs, longest=0 if self.unroll else 8):

            def repeat(number, carry, segment=segment):
                stream, cache, touched = carry
                for within in range(segment.period):
                    slot = jnp.asarray(segment.start + within + number * segment.period, jnp.int32)
                    mixer, mlp = pairs[segment.start + within]
                    stream, cache, read = self._layer(mixer, mlp, slot, stream, cache, step)
                    touched = touched + read
                return stream, cache, touched

            carry = repeat(0, carry) if segment.repeats == 1 else jax.lax.fori_loop(0, segment.repeats, repeat, carry)
        return carry

    def _run_streamed(self, pairs: list[tuple], cache: tuple, stream, step: Step):
        """As `run`. While a slot runs the weights of the next one come in; those of a stage's first come in alone."""

        def repeat(segment: Segment, following: tuple | None, number, carry):
            """One repeat of a segment, after which the weights of a slot of `following` have come in."""
            stream, cache, touched, held = carry
            for within in range(segment.period):
                slot = jnp.asarray(segment.start + within + number * segment.period, jnp.int32)
                mixer, mlp = pairs[segment.start + within]
                after = pairs[segment.start + within + 1] if within + 1 < segment.period else following
                coming = self._bring(after, slot + 1) if after else None
                stage = replace(self, weights=held, ops=BroughtOperations(self.ops))
                stream, cache, read = stage._layer(mixer, mlp, slot, stream, cache, step)
                touched, held = touched + read, coming
            return stream, cache, touched, held

        touched = jnp.zeros((len(self.placement.mlps),), jnp.float32)
        carry = stream, cache, touched, self._bring(pairs[0], jnp.zeros((), jnp.int32))
        for segment in segments(pairs, longest=0 if self.unroll else 8):
            # What comes in during the last repeat is of another kind, so that one is no part of the loop.
            end = segment.start + segment.period * segment.repeats
            again = partial(repeat, segment, pairs[segment.start])
            carry = jax.lax.fori_loop(0, segment.repeats - 1, again, carry) if segment.repeats > 1 else carry
            carry = repeat(segment, pairs[end] if end < len(pairs) else None, segment.repeats - 1, carry)
        return carry[:3]

    def _bring(self, pair: tuple, slot: jax.Array) -> dict:
        """The weights of a slot in which wafers have the stacks of `pair`, as `_mixer` and `_mlp` look for them."""
        mixer, mlp = pair
        position = {name: self.tables[name][slot] for name in ("mixer_position", "mlp_position", "place")}

        def layer(group: str, stack: int, where: str) -> dict:
            return brought(bring(self.weights[group][stack], position[where]))

        return {
            "mixers": {s: layer("mixers", s, "mixer_position") for s in mixer if s >= 0},
            "mlps": {s: layer("mlps", s, "mlp_position") for s in mlp if s >= 0},
            "residuals": {s: layer("residuals", s, "place") for s in range(len(self.placement.residuals))},
        }

    def _layer(self, mixer: tuple[int, ...], mlp: tuple[int, ...], slot: jax.Array, stream, cache: tuple, step: Step):
        """The stream, the caches and the experts read after the layer of a slot where wafers have these stacks."""
        read = jnp.zeros((len(self.placement.mlps),), jnp.float32)
        if self.only != "mlps":
            stream, cache = self._mixer(mixer, slot, stream, cache, step)
        if self.only != "mixers":
            stream, read = self._mlp(mlp, slot, stream, step)
        return stream, cache, read

    def _residual(self, slot: jax.Array) -> tuple[Plain | Blocks, dict, jax.Array, jax.Array]:
        """The residual's rule, its weights, the slot's position among them, and the number of the layer."""
        weights = self.weights["residuals"][0] if self.placement.residuals else {}
        return residual(self.placement.spec.residual), weights, self.tables["place"][slot], self.tables["layer"][slot]

    def _mixer(self, stacks: tuple[int, ...], slot: jax.Array, stream, cache: tuple, step: Step):
        """The stream and the caches after the mixer of a slot where wafers have `stacks`, as `layers.mixers` says.

        The caches are written between the branches: a cache that went through one would be copied.
        """
        here, layer = self.tables["mixer_stack"][slot], self.tables["mixer_position"][slot]
        kinds = {s: self.placement.mixers[s].kind for s in stacks if s >= 0}
        weights = self.weights["mixers"]
        run = partial(self._switch, stacks, here, step)
        rule, *of_slot = self._residual(slot)
        x, stream = rule.mixer_input(stream, *of_slot)

        projected = run(
            {s: partial(mixers.module(kind).project, kind, weights[s], ops=self.ops) for s, kind in kinds.items()},
            {s: (layer, x, step, cache[s]) for s in kinds},
        )
        carry = {s: self._together(s, "exchange", taken) for s, (taken, _) in projected.items()}
        caches = list(cache)
        for s, (_, rows) in projected.items():
            mine = jnp.asarray(True) if len(stacks) == 1 else here == s
            caches[s] = self._write(kinds[s], caches[s], layer, rows, step, mine)
            if advance := getattr(mixers.module(kinds[s]), "advance", None):
                slot = jnp.where(mine & (step.count > 0), step.slot, -1)
                carry[s], caches[s] = advance(kinds[s], weights[s], layer, carry[s], caches[s], slot, step, self.ops)
        attending = [s for s in kinds if hasattr(mixers.module(kinds[s]), "attend")]
        if attending:
            branches = {
                s: partial(mixers.module(kinds[s]).attend, kinds[s], weights[s], ops=self.ops) for s in attending
            }
            carry |= run(branches, {s: (layer, carry[s], caches[s], step) for s in attending})
        carry = {s: self._together(s, "combine", taken) for s, taken in carry.items()}
        partials = run(
            {s: partial(mixers.module(kind).output, kind, weights[s], ops=self.ops) for s, kind in kinds.items()},
            {s: (layer, carry[s]) for s in kinds},
        )
        return rule.add(stream, psum(total(partials.values(), x), "core")), tuple(caches)

    def _together(self, stack: int, phase: str, carry):
        """A phase of collectives, which every wafer takes part in: outside the branches."""
        kind = self.placement.mixers[stack].kind
        collective = getattr(mixers.module(kind), phase, None)
        return collective(kind, carry) if collective else carry

    def _write(self, kind, cache: dict, layer: jax.Array, rows: dict, step: Step, mine: jax.Array) -> dict:
        """The caches of a stack with a micro-batch's rows, on wafers where the slot is `mine`."""
        written = dict(cache)
        for field in kind.cache():
            if field.name not in rows:
                continue
            store = cache[field.name]
            block, offset = step.rows(rows[field.name].shape[1], store.block)
            if field.spread:
                # The shard's first block; another core's blocks lie before or after.
                first = jax.lax.axis_index("core").astype(jnp.int32) * store.blocks
                block = jnp.where((block >= first) & (block < first + store.blocks), block - first, -1)
            written[field.name] = self.ops.append(store, layer, jnp.where(mine, block, -1), offset, rows[field.name])
        return written

    def _mlp(self, stacks: tuple[int, ...], slot: jax.Array, stream, step: Step):
        """The stream after the MLP in a slot, by the phases of `layers.mlps`, and the experts read, float32 [MLP
        stacks]."""
        here, layer = self.tables["mlp_stack"][slot], self.tables["mlp_position"][slot]
        kinds = {s: self.placement.mlps[s].kind for s in stacks if s >= 0}
        phases = {s: mlps.phases(kind) for s, kind in kinds.items()}
        rule, *of_slot = self._residual(slot)
        x = rule.mlp_input(stream, *of_slot)
        results = dict.fromkeys(kinds, x)
        for number in range(max(map(len, phases.values()), default=0)):
            now = {s: each[number] for s, each in phases.items() if number < len(each)}
            if number % 2:
                results |= {s: collective(kinds[s], results[s]) for s, collective in now.items()}
                continue
            branches = {s: partial(f, kinds[s], self.weights["mlps"][s], ops=self.ops) for s, f in now.items()}
            results |= self._switch(stacks, here, step, branches, {s: (layer, results[s], step) for s in now})
        touched = jnp.zeros((len(self.placement.mlps),), jnp.float32)
        for s, (_, read) in results.items():
            touched = touched.at[s].add(read)
        return rule.add(stream, psum(total([part for part, _ in results.values()], x), "core")), touched

    def _switch(self, stacks: tuple[int, ...], here: jax.Array, step: Step, branches: dict[int, Callable],
                operands: dict[int, tuple]) -> dict:  # fmt: skip
        """{stack: result} of the branch of the stack that this wafer has here; the others' results are zeros."""
        if len(stacks) == 1 and not self.gated:
            return {s: branch(*operands[s]) for s, branch in branches.items()}
        shapes = {s: jax.eval_shape(branch, *operands[s]) for s, branch in branches.items()}

        def only(chosen: int | None) -> Callable:
            return lambda operands: {
                s: branches[s](*operands[s]) if s == chosen else zeros(shapes[s]) for s in branches
            }

        busy = jnp.any(step.count > 0) if self.gated else True
        index = jnp.asarray(len(branches), jnp.int32)
        for number, s in enumerate(branches):
            index = jnp.where((here == s) & busy, number, index)
        return jax.lax.switch(index, [*map(only, branches), only(None)], operands)


def zeros(shapes):
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def total(partials: Iterable[jax.Array], x: jax.Array) -> jax.Array:
    """The sum of every stack's partial sum; zero where a slot is empty on all wafers."""
    return sum(partials, jnp.zeros(x.shape, jnp.float32))
