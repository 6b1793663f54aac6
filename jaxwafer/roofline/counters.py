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


@dataclass(frozen=True, kw_only=True)
class Counts:
    """What wafers tallied in a run, [wafers]: ticks with live rows, rows (tokens) worked on, KV rows in live blocks of
    those; and [wafers, MLP stacks]: experts whose weights were read, over all cores."""

    busy_ticks: np.ndarray
    tokens: np.ndarray
    kv_rows: np.ndarray
    experts: np.ndarray

    @property
    def context(self) -> np.ndarray:
        """Mean KV rows a token sees on each wafer."""
        return self.kv_rows / np.maximum(self.tokens, 1)


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of a whole run, in bytes but for flops.

    weights: by format name. kv: read and written. state: recurrent state, read and written. hops: sent to the next
    wafer. padding: among weights and kv, zero heads, columns and rows and copies of heads, which one core would not
    have. flops: of matrices and mixers, without padding.
    """

    weights: dict[str, float]
    kv: float
    state: float
    hops: float
    padding: float
    flops: float

    @property
    def bytes(self) -> float:
        return sum(self.weights.values()) + self.kv + self.state + self.hops


def decode_traffic(cache: CacheShape, activation_bytes: int, counts: Counts) -> Traffic:
    """Traffic of a decode run. activation_bytes: of one element of the residual stream."""
    place = cache.placement
    weights: Counter[str] = Counter()
    padding = 0.0

    def add(storage: Storage, times: float) -> None:
        nonlocal padding
        nbytes = times * storage.wafer_bytes(place.wafers, place.cores)
        weights[storage.format.name] += nbytes
        # Experts are padded by whole ones, which no token reads.
        padding += 0.0 if storage.weight.of_experts else nbytes * storage.padding

    for stack in place.mixers:
        for storage in stack.weights.values():
            add(storage, float(np.sum(layer_counts(stack) * counts.busy_ticks)))
    for number, stack in enumerate(place.mlps):
        for storage in stack.weights.values():
            if storage.weight.of_experts:
                add(storage, float(np.sum(counts.experts[:, number])) / len(storage.index[0]))
            else:
                add(storage, float(np.sum(layer_counts(stack) * counts.busy_ticks)))
    head, embedding = head_storage(place), place.globals["embedding"]
    for storage in (head, place.globals["final_norm"]):
        add(storage, float(counts.busy_ticks[-1]) * place.wafers)
    table = place.wafers * embedding.wafer_bytes(place.wafers, place.cores)
    weights[embedding.format.name] += float(counts.tokens[0]) * table / len(embedding.index[0])

    kv = state = 0.0
    for stack in place.mixers:
        layers = layer_counts(stack)
        rows = np.minimum(counts.context, getattr(stack.kind, "window", None) or np.inf) + 1
        touched = float(np.sum(layers * counts.tokens * rows))
        stored, real = cache.token_bytes(stack), real_token_bytes(cache, stack)
        kv += touched * stored
        padding += touched * (stored - real)
        state += 2.0 * float(np.sum(layers * counts.tokens)) * cache.state_bytes(stack)
    hops = float(np.sum(counts.tokens[:-1])) * place.cores * (place.spec.hidden * activation_bytes + 8)
    flops = decode_flops(place, counts)
    return Traffic(weights=dict(weights), kv=kv, state=state, hops=hops, padding=padding, flops=flops)


def layer_counts(stack: Stack) -> np.ndarray:
    """Layers of a stack on each wafer."""
    return np.array([len(on) for on in stack.layers])


def head_storage(place: Placement) -> Storage:
    return place.globals.get("head", place.globals["embedding"])


def real_token_bytes(cache: CacheShape, stack: Stack) -> int:
    """KV bytes of a token in one layer without copied or zero heads."""
    axes = [f.axis for f in stack.kind.cache() if isinstance(f, TokenField)]
    return sum(axis.size // axis.unit * cache.format.row_bytes(axis.unit) for axis in axes)


def decode_flops(place: Placement, counts: Counts) -> float:
    """2 FLOPs for every matrix element a token goes through, chosen experts alone, and the mixers' own."""
    total = 2.0 * head_storage(place).weight.size * float(counts.tokens[-1])
    for stack in (*place.mixers, *place.mlps):
        tokens = layer_counts(stack) * counts.tokens
        total += 2.0 * active_size(stack.kind) * float(np.sum(tokens))
        if hasattr(stack.kind, "flops"):
            total += sum(n * stack.kind.flops(c) for n, c in zip(tokens.tolist(), counts.context.tolist(), strict=True))
    return total


def active_size(kind: Mixer | MLP) -> float:
    """Matrix elements that one token goes through; of experts, the chosen."""
    router = getattr(kind, "router", None)
    share = router.chosen / kind.experts if router else 1.0
    return sum(w.size * (share if w.of_experts else 1.0) for w in kind.weights() if w.matrix)


def imbalance(cache: CacheShape, counts: Counts) -> float:
    """Bytes a tick of the busiest wafer over the mean of all wafers; 1 is even."""
    place = cache.placement
    ticks = np.maximum(counts.busy_ticks, 1)
    layers = [place.weight_bytes(w) - place.global_bytes for w in range(place.wafers)]
    for number, stack in enumerate(place.mlps):
        experts = [s for s in stack.weights.values() if s.weight.of_experts]
        held = sum(s.wafer_bytes(place.wafers, place.cores) for s in experts)
        for w, on in enumerate(stack.layers):
            if experts:
                read = counts.experts[w, number] / ticks[w] / len(experts[0].index[0])
                layers[w] += held * (read - len(on))
    kv = [cache.wafer_token_bytes(w) * counts.kv_rows[w] / ticks[w] for w in range(place.wafers)]
    state = [2 * cache.wafer_state_bytes(w) * counts.tokens[w] / ticks[w] for w in range(place.wafers)]
    each = np.array(layers) + np.array(kv) + np.array(state)
    return float(each.max() / each.mean())
