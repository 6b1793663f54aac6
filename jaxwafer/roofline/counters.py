"""Counted bytes and FLOPs of decoding, by component, from the declarations and what each wafer tallied.

A byte is counted when work needed it: weights of a wafer's layers once for every tick with a live row, KV rows in
live blocks, activations that hopped. Copies that a compiler adds, and ticks with nothing to do, are not counted.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from jaxwafer.cache.kv import CacheShape
from jaxwafer.partition.placement import Placement, Stack
from jaxwafer.quant.storage import Storage


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Of a whole run. weights: bytes by format name. padding: bytes among weights and kv that are zero heads, columns
    or rows, or copies of heads, which one core would not have. flops: of matrices and attention, without padding."""

    weights: dict[str, float]
    kv: float
    hops: float
    padding: float
    flops: float

    @property
    def bytes(self) -> float:
        return sum(self.weights.values()) + self.kv + self.hops


def decode_traffic(cache: CacheShape, activation_bytes: int, *, busy_ticks: np.ndarray, tokens: np.ndarray,
                   kv_rows: np.ndarray) -> Traffic:  # fmt: skip
    """Traffic of a decode run.

    busy_ticks, tokens, kv_rows: [wafers], ticks with live rows, rows worked on, KV rows attended to (in whole blocks).
    activation_bytes: of one element of the residual stream.
    """
    place = cache.placement
    weights: Counter[str] = Counter()
    padding = 0.0

    def add(storage: Storage, times: float) -> None:
        nonlocal padding
        nbytes = times * storage.wafer_bytes(place.wafers, place.cores)
        weights[storage.format.name] += nbytes
        padding += nbytes * storage.padding

    for stack in (*place.mixers, *place.mlps):
        times = float(sum(len(on) * ticks for on, ticks in zip(stack.layers, busy_ticks, strict=True)))
        for storage in stack.weights.values():
            add(storage, times)
    head = place.globals.get("head", place.globals["embedding"])
    for storage in (head, place.globals["final_norm"]):
        add(storage, float(busy_ticks[-1]) * place.wafers)
    embedding = place.globals["embedding"]
    rows = len(embedding.index[0])
    weights[embedding.format.name] += (
        float(tokens[0]) * place.wafers * embedding.wafer_bytes(place.wafers, place.cores) / rows
    )

    kv = 0.0
    for stack in place.mixers:
        layers = np.array([len(on) for on in stack.layers])
        rows_touched = float(np.sum(layers * (kv_rows + tokens)))
        stored, real = cache.token_bytes(stack), real_token_bytes(cache, stack)
        kv += rows_touched * stored
        padding += rows_touched * (stored - real)
    hops = float(np.sum(tokens[:-1])) * place.cores * (place.spec.hidden * activation_bytes + 8)
    return Traffic(
        weights=dict(weights),
        kv=kv,
        hops=hops,
        padding=padding,
        flops=decode_flops(place, tokens=tokens, kv_rows=kv_rows),
    )


def real_token_bytes(cache: CacheShape, stack: Stack) -> int:
    """KV bytes of a token in one layer without copied or zero heads."""
    fields = [f.axes[0] for f in stack.kind.cache()]
    return sum(axis.size // axis.unit * cache.format.row_bytes(axis.unit) for axis in fields)


def decode_flops(place: Placement, *, tokens: np.ndarray, kv_rows: np.ndarray) -> float:
    """2 FLOPs for every matrix element and token, and attention over the rows read; [wafers] arrays as above."""
    total = 0.0
    for stack in (*place.mixers, *place.mlps):
        matrices = sum(s.weight.size for s in stack.weights.values() if len(s.weight.axes) > 1)
        layers = np.array([len(on) for on in stack.layers])
        total += 2.0 * matrices * float(np.sum(layers * tokens))
    for stack in place.mixers:
        layers = np.array([len(on) for on in stack.layers])
        total += stack.kind.attention_flops(float(np.sum(layers * kv_rows)))
    head = place.globals.get("head", place.globals["embedding"])
    return total + 2.0 * head.weight.size * float(tokens[-1])


def imbalance(cache: CacheShape, *, busy_ticks: np.ndarray, kv_rows: np.ndarray) -> float:
    """Bytes a tick of the busiest wafer over the mean of all wafers; 1 is even."""
    place = cache.placement
    ticks = np.maximum(busy_ticks, 1)
    layers = [place.weight_bytes(w) - place.global_bytes for w in range(place.wafers)]
    kv = [cache.wafer_token_bytes(w) * kv_rows[w] / ticks[w] for w in range(place.wafers)]
    each = np.array(layers) + np.array(kv)
    return float(each.max() / each.mean())
