"""The phases of a mixer, and the module that has them for each kind.

A mixer's module has pure functions on one core's shard, run in this order with collectives and cache writes between:

    project(kind, weights, layer, x, step, cache, ops) → (carry, rows)   rows: what goes into fields of the cache
    advance(kind, weights, layer, carry, cache, slot, step, ops) → (carry, cache)
                                                                         optional; a recurrence in the cache, of rows
                                                                         whose slot is not negative
    exchange(kind, carry) → carry                                        optional; collectives over cores
    attend(kind, weights, layer, carry, cache, step, ops) → carry        optional; once the rows are in the cache
    combine(kind, carry) → carry                                         optional; collectives over cores
    output(kind, weights, layer, carry, ops) → partial                   this core's partial sum, float32 [B, T, hidden]

`layer` is the position in the stack. What passes between phases is up to the module.
"""

from types import ModuleType

from jaxwafer.layers import gdn, gqa, kda, mla
from jaxwafer.model.kinds import GQA, KDA, MLA, GatedDeltaNet, Mixer

MODULES: dict[type, ModuleType] = {GQA: gqa, MLA: mla, KDA: kda, GatedDeltaNet: gdn}


def module(kind: Mixer) -> ModuleType:
    return MODULES[type(kind)]
