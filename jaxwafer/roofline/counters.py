"""Counted bytes and FLOPs of decoding, by component, from the declarations and what each wafer tallied.

A byte is counted when work needed it: weights of a wafer's layers once for every tick with a live row, KV rows in
live blocks, activations that hopped. Copies that a compiler adds, and ticks with nothing to do, are not counted.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from jaxwafer.cache.kv import CacheShape
from jaxwafer.model.declare import TokenField
from jaxwafer.model.kinds import MLP, Mixer
from jaxwafer.partition.placement import Placement, Stack
from jaxwafer.quant.storage import Storage


@dataclass(frozen=True)
class Counts:
    """What wafers tallied in a run, [wafers, phases]: ticks with live rows, rows (tokens) worked on, KV rows in live
    blocks of those; and [wafers, MLP stacks]: experts whose weights were read, over all cores."""

    busy_ticks: np.ndarray
    tokens: np.ndarray
    kv_rows: np.ndarray
    experts: np.ndarray

    @property
    def context(self) -> np.ndarray:
        """Mean KV rows that a token sees, [wafers, phases]."""
        return self.kv_rows / np.maximum(self.tokens, 1)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of a whole run, in bytes but for flops.

    weights: by format name, and `components` by what they are of: "mixers", "mlps" and "rest" (embedding, final norm,
    head, and what mixes residual blocks). kv: read and written. state: recurrent state, read and written. hops: sent to
    the next wafer. padding: among weights and kv, zero heads, columns and rows and copies of heads, which one core
    would not have. flops: of matrices and mixers, without padding.
    """

    weights: dict[str, float]
    components: dict[str, float]
    kv: float
    state: float
    hops: float
    padding: float
    flops: float

    @property
    def bytes(self) -> float:
        return sum(self.weights.values()) + self.kv + self.state + self.hops

    @property
    def shares(self) -> dict[str, float]:
        """Bytes by component: caches are the mixers', hops the rest's."""
        mixers = self.components["mixers"] + self.kv + self.state
        return {"mixers": mixers, "mlps": self.components["mlps"], "rest": self.components["rest"] + self.hops}


def decode_traffic(cache: CacheShape, activation_bytes: int, counts: Counts) -> Traffic:
    """Traffic of a decode run. activation_bytes: of one element of the residual stream."""
    place = cache.placement
    weights: Counter[str] = Counter()
    components = dict.fromkeys(("mixers", "mlps", "rest"), 0.0)
    padding = 0.0

    def add(component: str, storage: Storage, times: float) -> None:
        nonlocal padding
        nbytes = times * storage.wafer_bytes(place.wafers, place.cores)
        weights[storage.format.name] += nbytes
        components[component] += nbytes
        # Experts are padded by whole ones, which no token reads.
        padding += 0.0 if storage.weight.of_experts else nbytes * storage.padding

    for component, stacks in (("mixers", place.mixers), ("rest", place.residuals)):
        for stack in stacks:
            for storage in stack.weights.values():
                add(component, storage, float(np.sum(layer_counts(place, stack) * counts.busy_ticks)))
    for number, stack in enumerate(place.mlps):
        for storage in stack.weights.values():
            if storage.weight.of_experts:
                add("mlps", storage, float(np.sum(counts.experts[:, number])) / len(storage.index[0]))
            else:
                add("mlps", storage, float(np.sum(layer_counts(place, stack) * counts.busy_ticks)))
    exit_wafer, exit_phase, _ = place.schedule.exit
    left = float(counts.busy_ticks[exit_wafer, exit_phase])
    head, embedding = head_storage(place), place.globals["embedding"]
    for storage in (head, place.globals["final_norm"]):
        add("rest", storage, left * place.wafers)
    table = place.wafers * embedding.wafer_bytes(place.wafers, place.cores)
    looked_up = float(counts.tokens[place.schedule.entry, 0]) * table / len(embedding.index[0])
    weights[embedding.format.name] += looked_up
    components["rest"] += looked_up

    kv = state = 0.0
    for stack in place.mixers:
        layers = layer_counts(place, stack)
        window = getattr(stack.kind, "window", None)
        read = np.minimum(counts.kv_rows, counts.tokens * window) if window else counts.kv_rows
        touched = float(np.sum(layers * (read + counts.tokens)))
        stored, real = cache.token_bytes(stack), real_token_bytes(cache, stack)
        kv += touched * stored
        padding += touched * (stored - real)
        state += 2.0 * float(np.sum(layers * counts.tokens)) * cache.state_bytes(stack)
    rows = 1 + (place.spec.residual.blocks if place.spec.residual else 0)
    hopping = float(np.sum(counts.tokens) - counts.tokens[exit_wafer, exit_phase])
    hops = hopping * place.cores * (rows * place.spec.hidden * activation_bytes + 8)
    flops = decode_flops(place, counts)
    return Traffic(
        weights=dict(weights), components=components, kv=kv, state=state, hops=hops, padding=padding, flops=flops
    )


def layer_counts(place: Placement, stack: Stack) -> np.ndarray:
    """Layers of a stack that each wafer runs in each phase, [wafers, phases]."""
    ours = np.isin(np.arange(len(place.spec.layers)), [layer for on in stack.layers for layer in on])
    return np.stack([np.sum((p.layer >= 0) & ours[p.layer], axis=1) for p in place.phases], axis=1)


def head_storage(place: Placement) -> Storage:
    return place.globals.get("head", place.globals["embedding"])


def real_token_bytes(cache: CacheShape, stack: Stack) -> int:
    """KV bytes of a token in one layer without copied or zero heads."""
    axes = [f.axis for f in stack.kind.cache() if isinstance(f, TokenField)]
    return sum(axis.size // axis.unit * cache.format.row_bytes(axis.unit) for axis in axes)


def decode_flops(place: Placement, counts: Counts) -> float:
    """2 FLOPs for every matrix element a token goes through, chosen experts alone, and the mixers' own."""
    total = 2.0 * head_storage(place).weight.size * float(counts.tokens[place.schedule.exit[:2]])
    for stack in (*place.mixers, *place.mlps):
        tokens = layer_counts(place, stack) * counts.tokens
        total += 2.0 * active_size(stack.kind) * float(np.sum(tokens))
        if hasattr(stack.kind, "flops"):
            total += sum(n * stack.kind.flops(c) for n, c in zip(tokens.flat, counts.context.flat, strict=True))
    return total


def active_size(kind: Mixer | MLP) -> float:
    """Matrix elements that one token goes through; of experts, the chosen."""
    router = getattr(kind, "router", None)
    share = router.chosen / kind.experts if router else 1.0
    return sum(w.size * (share if w.of_experts else 1.0) for w in kind.weights() if w.matrix)


def imbalance(cache: CacheShape, counts: Counts) -> float:
    """Bytes a round of the busiest wafer over the mean of all wafers; 1 is even."""
    place = cache.placement
    ticks = np.maximum(counts.busy_ticks, 1)
    each = np.zeros(counts.busy_ticks.shape)
    wafers = np.zeros(place.wafers)
    for stack in place.stacks:
        fixed = [s.wafer_bytes(place.wafers, place.cores) for s in stack.weights.values() if not s.weight.of_experts]
        each += layer_counts(place, stack) * sum(fixed)
    for number, stack in enumerate(place.mlps):
        for storage in stack.weights.values():
            if storage.weight.of_experts:
                expert = storage.wafer_bytes(place.wafers, place.cores) / len(storage.index[0])
                wafers += counts.experts[:, number] / ticks.max(axis=1) * expert
    for stack in place.mixers:
        moved = cache.token_bytes(stack) * counts.kv_rows + 2 * cache.state_bytes(stack) * counts.tokens
        each += layer_counts(place, stack) * moved / ticks
    wafers += each.sum(axis=1)
    return float(wafers.max() / wafers.mean())
