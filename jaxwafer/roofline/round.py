"""What is known of one round of decoding before anything is compiled: bytes by declaration and by the counters."""

import math

import numpy as np

from jaxwafer.cache.kv import CacheShape
from jaxwafer.roofline.counters import Counts, Traffic, decode_traffic


def planned_bytes(cache: CacheShape) -> dict[str, int]:
    """Declared bytes of weights and caches on each device."""
    place = cache.placement
    return {"weights": place.allocated_bytes // place.cores, "cache": cache.allocated_bytes // place.cores}


def counted_bytes(cache: CacheShape, batch: int, context: int) -> float:
    """Counted bytes of `full_round` on a device, their mean over all."""
    return round_traffic(cache, batch, context).bytes / _devices(cache)


def counted_shares(cache: CacheShape, batch: int, context: int) -> dict[str, float]:
    """The same by component, as `Traffic.shares`."""
    shares = round_traffic(cache, batch, context).shares
    return {name: nbytes / _devices(cache) for name, nbytes in shares.items()}


def round_traffic(cache: CacheShape, batch: int, context: int) -> Traffic:
    return decode_traffic(cache, cache.dtype.itemsize, full_round(cache, batch, context))


def _devices(cache: CacheShape) -> int:
    return cache.placement.wafers * cache.placement.cores


def full_round(cache: CacheShape, batch: int, context: int) -> Counts:
    """The counts of one round in which every wafer works on a micro-batch of `batch` requests with a full context."""
    place = cache.placement
    schedule = place.schedule
    visits = [[schedule.at(w, phase) is not None for phase in range(schedule.period)] for w in range(place.wafers)]
    tokens = np.array(visits, float) * batch
    experts = np.zeros((place.wafers, len(place.mlps)))
    for number, stack in enumerate(place.mlps):
        if router := getattr(stack.kind, "router", None):
            share = 1 - (1 - router.chosen / stack.kind.experts) ** batch
            experts[:, number] = [len(layers) * share * stack.kind.experts for layers in stack.layers]
    rows = math.ceil(context / cache.block) * cache.block
    return Counts(busy_ticks=np.array(visits, float), tokens=tokens, kv_rows=tokens * rows, experts=experts)
