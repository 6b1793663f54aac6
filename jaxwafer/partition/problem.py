"""What a strategy is asked: a model, a device and how much must fit; and what it answers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from jaxwafer.errors import UserError
from jaxwafer.hardware import Description
from jaxwafer.partition.latency import Clock
from jaxwafer.partition.needs import Layer, Model, merged
from jaxwafer.partition.plan import Partition

VOCABULARY = ("room", "mesh", "ends")
# More than any pipeline has, of wafers and of devices of a wafer.
MOST = 4096


@dataclass(frozen=True, kw_only=True)
class Problem:
    """cores: devices of a wafer. wafers: how many there are, None for as few as hold it. requests: that must fit, None
    for any. micro_batch: requests that travel together.

    vocabulary: where embedding and head lie: "room", where the wafers have room; "mesh", evenly on all, as the engine
    has them; "ends", with the first and the last layer. most_layers: on a wafer. change_cost: what one more change of
    wafers a token is worth, in wafers. accepted: tokens a step (above 1 with speculation).
    streamed: layers' weights wait in external memory and come in one by one, the next one while one runs; every pass of
    a micro-batch brings all of them.
    """

    model: Model
    device: Description
    context: int
    cores: int = 1
    wafers: int | None = None
    requests: int | None = None
    micro_batch: int = 1
    vocabulary: str = "room"
    most_layers: int | None = None
    change_cost: float = 0.01
    compute: str = "bf16"
    accepted: float = 1.0
    streamed: bool = False

    def __post_init__(self):
        for name in ("context", "cores", "wafers", "requests", "micro_batch", "most_layers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
        for name in ("cores", "wafers"):
            if (getattr(self, name) or 1) > MOST:
                raise UserError(f"--{name} must be at most {MOST}, not {getattr(self, name)}")
        if self.vocabulary not in VOCABULARY:
            raise UserError(f"unknown --vocabulary {self.vocabulary!r}; choose one of {', '.join(VOCABULARY)}")
        if not 0 <= self.change_cost < 1e6:
            raise UserError(f"--change-cost must be at least 0 and below 1e6, not {self.change_cost:g}")
        if not 1 <= self.accepted < 1e3:
            raise UserError(f"--accepted must be at least 1 and below 1000, not {self.accepted:g}")
        limit = self.model.max_context
        if limit is not None and self.context > limit:
            raise UserError(f"--context {self.context} is more than the {limit} positions that {self.model.name} has")
        hardware = self.device.hardware
        hardware.flops_per_s(self.compute)
        if self.streamed and (hardware.external_bytes is None or hardware.external_bytes_per_s is None):
            raise UserError(
                f"--stream-weights needs the external memory of {hardware.name}, which is not described: give "
                "--set external_bytes=... and --set external_bytes_per_s=..."
            )

    @property
    def count(self) -> int:
        return len(self.model.layers)

    @property
    def least(self) -> int:
        """Requests that must fit."""
        return self.requests or 1

    @property
    def memory(self) -> int:
        """Bytes of a wafer, without what activations take: a micro-batch that arrives and one that leaves."""
        activations = 2 * self.micro_batch * self.model.stream_bytes(self.count - 1)
        return int(self.device.hardware.memory_bytes) * self.cores - activations

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers, with the vocabulary counted to the ends where it is to lie there."""
        return merged(self.model, self.vocabulary)

    @cached_property
    def clock(self) -> Clock:
        return Clock(
            device=self.device, model=self.model, cores=self.cores, compute=self.compute, streamed=self.streamed
        )

    @cached_property
    def weights(self) -> np.ndarray:
        """Bytes of each layer that stay on its wafer, int64 [layers]."""
        return np.array([layer.weights for layer in self.layers], np.int64) - self.external

    @cached_property
    def external(self) -> np.ndarray:
        """Bytes of each layer in external memory, int64 [layers]."""
        return np.array([layer.weights if self.streamed else 0 for layer in self.model.layers], np.int64)

    @property
    def external_room(self) -> int:
        """Bytes of a wafer's external memory."""
        return int(self.device.hardware.external_bytes or 0) * self.cores

    @property
    def window(self) -> int:
        """Bytes of a wafer through which layers stream: one that runs and one that comes in."""
        return 2 * int(self.external.max())

    @cached_property
    def request_bytes(self) -> np.ndarray:
        """Bytes that a request keeps in each layer, int64 [layers]."""
        return np.array([layer.request(self.context) for layer in self.layers], np.int64)

    @cached_property
    def seconds(self) -> np.ndarray:
        """Estimated time of each layer for a micro-batch, on the whole wafer, float64 [layers]."""
        times = {
            layer: self.clock.layer(layer, self.micro_batch, self.context).total for layer in set(self.model.layers)
        }
        return np.array([times[layer] for layer in self.model.layers])

    def head_devices(self, wafers: int) -> int:
        """Devices that compute the logits: all of them where the vocabulary lies on all, else those of one wafer."""
        return self.cores * (wafers if self.vocabulary == "mesh" else 1)

    def room(self, wafers: int) -> int:
        """Bytes of a wafer for layers and requests, where there are so many."""
        return self.beside_window - (-(-self.model.vocabulary // wafers) if self.vocabulary == "mesh" else 0)

    @property
    def beside_window(self) -> int:
        """Bytes of a wafer for all that stays there."""
        return self.memory - self.window

    @property
    def vocabulary_wafers(self) -> int:
        """Wafers that the vocabulary fills where it lies on wafers of its own."""
        return -(-self.model.vocabulary // max(1, self.beside_window))

    def fits(self, layers, requests: int, wafers: int) -> bool:
        """Whether a wafer holds these layers with so many requests."""
        chosen = list(layers)
        if self.most_layers is not None and len(chosen) > self.most_layers:
            return False
        need = int(self.weights[chosen].sum()) + requests * int(self.request_bytes[chosen].sum())
        return need <= self.room(wafers) and int(self.external[chosen].sum()) <= self.external_room

    @property
    def lower_bound(self) -> int:
        """Wafers below which the bytes alone do not fit."""
        layers = -(-self.count // self.most_layers) if self.most_layers else 1
        outside = -(-int(self.external.sum()) // self.external_room) if self.streamed else 1
        return max(1, layers, outside, -(-self._need // max(1, self.beside_window)))

    @property
    def _need(self) -> int:
        """Bytes on all wafers, without windows."""
        return self.model.weights - int(self.external.sum()) + self.least * int(self.request_bytes.sum())

    def check_layers(self) -> None:
        """Refuse a layer that no wafer holds, with its size."""
        hardware = self.device.hardware
        if self.beside_window <= 0:
            raise UserError(
                f"two layers that stream take {self.window / 1e9:.2f} GB, but a wafer of {self.cores} x "
                f"{hardware.name} has {self.memory / 1e9:.2f} GB: give more --cores"
            )
        for number, layer in enumerate(self.layers):
            need = int(self.weights[number]) + self.least * layer.request(self.context)
            if self.external[number] > self.external_room:
                raise UserError(
                    f"layer {number} ({layer.kind}) takes {layer.weights / 1e9:.2f} GB of external memory, but a wafer "
                    f"of {self.cores} x {hardware.name} has {self.external_room / 1e9:.2f} GB of it: give more --cores"
                )
            if need > self.room(self.count):
                cores = max(self.cores + 1, -(-need // int(hardware.memory_bytes)))
                raise UserError(
                    f"layer {number} ({layer.kind}) takes {need / 1e9:.2f} GB with {self.least} requests of "
                    f"{self.context} tokens, but a wafer of {self.cores} x {hardware.name} has "
                    f"{self.memory / 1e9:.2f} GB: give --cores {cores} or more, fewer requests or less context"
                )

    def search(self, pack: Callable[[int], Partition | None]) -> Partition:
        """The first partition that pack(wafers) finds, from the lower bound up, or for just the wafers given.

        Where nothing is found the UserError says what would have to change.
        """
        self.check_layers()
        bound = self.lower_bound
        if self.wafers is not None and self.wafers < bound:
            raise UserError(
                f"{self.wafers} wafers hold {self.wafers * self.memory / 1e9:.1f} GB, but {self.model.name} takes "
                f"{self._need / 1e9:.1f} GB with {self.least} requests of {self.context} tokens: at least {bound} "
                "wafers"
            )
        # With a layer a wafer, and a wafer or two for the vocabulary, everything fits that ever will.
        for wafers in [self.wafers] if self.wafers else range(bound, self.count + self.vocabulary_wafers + 1):
            found = pack(wafers)
            if found is not None:
                return found
        if self.wafers is None:
            raise UserError(
                f"no partition of {self.model.name} with {self.least} requests of {self.context} tokens fits"
            )
        enough = replace(self, wafers=None).search(pack).wafers
        raise UserError(
            f"{self.wafers} wafers are enough for the bytes of {self.model.name}, but not for its whole layers with "
            f"{self.least} requests of {self.context} tokens: {enough} wafers are"
        )


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A strategy's answer. cores: devices of a wafer, None for the problem's. shares: part of its wafer that each layer
    has as a region of its own; None where every layer has all of it in turn. note: for people."""

    partition: Partition
    cores: int | None = None
    shares: tuple[float, ...] | None = None
    note: str = ""


def padded(partition: Partition, wafers: int) -> Partition:
    """The partition with empty wafers behind it."""
    return Partition((*partition.layers, *((),) * (wafers - partition.wafers)), partition.route)
