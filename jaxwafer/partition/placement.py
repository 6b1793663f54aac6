"""Placement: where every declared weight and cache field of a model lies on a mesh, to the byte.

Layers whose mixer (or MLP) has the same kind and the same formats share a stack [wafers, depth, …]; depth is the most
such layers on any wafer. The arrays, the loader, the planner and the counters all read this one structure.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxwafer.model.declare import Weight
from jaxwafer.model.kinds import MLP, Mixer
from jaxwafer.model.residual import BlockResidual
from jaxwafer.model.spec import ModelSpec
from jaxwafer.partition.plan import Partition
from jaxwafer.partition.schedule import Schedule, schedule
from jaxwafer.quant.formats import Format
from jaxwafer.quant.storage import Storage, store

# (hub name, declaration) → the format the tensor is kept in
Formats = Callable[[str, Weight], Format]


def hub_name(weight: Weight, layer: int | None) -> str:
    return weight.hub if layer is None else f"model.layers.{layer}.{weight.hub}"


@dataclass(frozen=True, kw_only=True)
class Stack:
    """All layers' mixers (or MLPs) of one kind and format. layers[w]: the layers of wafer w in the stack, in order."""

    kind: Mixer | MLP | BlockResidual
    weights: dict[str, Storage]
    layers: tuple[tuple[int, ...], ...]

    @property
    def depth(self) -> int:
        return max(len(w) for w in self.layers)


@dataclass(frozen=True, kw_only=True)
class SlotTable:
    """Which stack, and which position in it, each slot of each wafer runs: int32 [wafers, slots]; stack −1 is empty."""

    stack: np.ndarray
    position: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What every wafer runs in one phase of the schedule. layer: int32 [wafers, slots], the layer, −1 where empty."""

    mixer: SlotTable
    mlp: SlotTable
    layer: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Placement:
    spec: ModelSpec
    partition: Partition
    wafers: int
    cores: int
    globals: dict[str, Storage]
    mixers: tuple[Stack, ...]
    mlps: tuple[Stack, ...]
    residuals: tuple[Stack, ...]
    schedule: Schedule
    phases: tuple[Phase, ...]

    @property
    def slots(self) -> int:
        """Slots of a round: of all its phases together."""
        return sum(phase.layer.shape[1] for phase in self.phases)

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """All stacks of layer weights."""
        return (*self.mixers, *self.mlps, *self.residuals)

    @property
    def formats(self) -> list[Format]:
        """The formats that matrices are in, but for experts', in order of first use."""
        return self._formats(experts=False)

    @property
    def expert_formats(self) -> list[Format]:
        """The formats that experts' matrices are in, in order of first use."""
        return self._formats(experts=True)

    def _formats(self, *, experts: bool) -> list[Format]:
        stacks = [s.weights for s in self.stacks] + [self.globals]
        used = (w for ws in stacks for w in ws.values() if w.weight.matrix and w.weight.of_experts == experts)
        return list(dict.fromkeys(w.format for w in used))

    def layer_bytes(self, stack: Stack) -> int:
        """Weight bytes of one layer of a stack over all cores of its wafer."""
        return sum(s.wafer_bytes(self.wafers, self.cores) for s in stack.weights.values())

    @property
    def global_bytes(self) -> int:
        """Bytes of embedding, head and final norm on each wafer."""
        return sum(s.wafer_bytes(self.wafers, self.cores) for s in self.globals.values())

    def weight_bytes(self, wafer: int) -> int:
        """Weight bytes that a wafer's layers and its share of the vocabulary need, without scratch slots."""
        layers = sum(len(s.layers[wafer]) * self.layer_bytes(s) for s in self.stacks)
        return layers + self.global_bytes

    @property
    def allocated_bytes(self) -> int:
        """Weight bytes that each wafer allocates: stacks are equally deep on every wafer."""
        return sum(s.depth * self.layer_bytes(s) for s in self.stacks) + self.global_bytes

    @property
    def streamed_bytes(self) -> int:
        """Bytes that a round brings to each wafer where layers' weights wait in host memory: for every slot a layer of
        each stack that any wafer has there."""
        return sum(self.slot_bytes)

    @property
    def slot_bytes(self) -> list[int]:
        """Of these the bytes of each slot of a round."""
        found = []
        residual = sum(self.layer_bytes(s) for s in self.residuals)
        for phase in self.phases:
            for columns in zip(phase.mixer.stack.T, phase.mlp.stack.T, strict=True):
                pairs = zip((self.mixers, self.mlps), columns, strict=True)
                used = (self.layer_bytes(stacks[s]) for stacks, column in pairs for s in set(column.tolist()) if s >= 0)
                found.append(residual + sum(used))
        return found


def place(spec: ModelSpec, partition: Partition, formats: Formats, *, cores: int) -> Placement:
    """Place `spec` on `partition.wafers` × `cores`; sizes it cannot hold are refused (`quant.storage.store`)."""
    partition.check(len(spec.layers))
    wafers = partition.wafers

    def stored(weight: Weight, layer: int | None) -> Storage:
        return store(weight, formats(hub_name(weight, layer), weight), wafers=wafers, cores=cores)

    def stacks(kinds: list) -> tuple[Stack, ...]:
        def key(layer: int) -> tuple:
            kind = kinds[layer]
            return kind, tuple(formats(hub_name(w, layer), w).name for w in kind.weights())

        members: dict[tuple, list[int]] = {}
        for layer in range(len(kinds)):
            members.setdefault(key(layer), []).append(layer)
        found = []
        for (kind, _), layers in members.items():
            weights = {w.name: stored(w, layers[0]) for w in kind.weights()}
            own = set(layers)
            on = tuple(tuple(i for i in wafer if i in own) for wafer in partition.layers)
            found.append(Stack(kind=kind, weights=weights, layers=on))
        return tuple(found)

    mixers = stacks([layer.mixer for layer in spec.layers])
    mlps = stacks([layer.mlp for layer in spec.layers])
    plan = schedule(partition)
    return Placement(
        spec=spec,
        partition=partition,
        wafers=wafers,
        cores=cores,
        globals={w.name: stored(w, None) for w in spec.globals()},
        mixers=mixers,
        mlps=mlps,
        residuals=stacks([spec.residual] * len(spec.layers)) if spec.residual else (),
        schedule=plan,
        phases=tuple(_phase(mixers, mlps, plan, phase) for phase in range(plan.period)),
    )


def _phase(mixers: tuple[Stack, ...], mlps: tuple[Stack, ...], plan: Schedule, phase: int) -> Phase:
    visits = [plan.at(wafer, phase) for wafer in range(plan.wafers)]
    layers = [() if v is None else plan.visits[v].layers for v in visits]
    table = np.full((plan.wafers, max(map(len, layers))), -1, np.int32)
    for wafer, run in enumerate(layers):
        table[wafer, : len(run)] = run
    return Phase(mixer=_slots(mixers, table), mlp=_slots(mlps, table), layer=table)


def _slots(stacks: tuple[Stack, ...], table: np.ndarray) -> SlotTable:
    stack, position = np.full_like(table, -1), np.zeros_like(table)
    for (wafer, slot), layer in np.ndenumerate(table):
        for number, one in enumerate(stacks):
            if layer in one.layers[wafer]:
                stack[wafer, slot], position[wafer, slot] = number, one.layers[wafer].index(layer)
    return SlotTable(stack=stack, position=position)
