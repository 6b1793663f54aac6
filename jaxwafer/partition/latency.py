"""How long a layer, a hop and the head take: bandwidth roof, compute roof and what is added to them.

t = overhead · (max(bytes / (η_w·BW), FLOPs / (η_c·C)) + sums + fixed), after LIFE, Alpa and the TPU scaling book; a
layer that streams in takes no less than its bytes at the rate of external memory.
Roofs are of the figures as they are; the estimate has the constants of `hardware.Constants` in it.
"""

import math
from dataclasses import dataclass

from jaxwafer.hardware import Description
from jaxwafer.partition.needs import ACTIVATION_BYTES, Layer, Model

# Sums over a stage's devices that a layer takes: after its mixer and after its MLP.
SUMS = 2
# And that embedding, head and sampling take.
HEAD_SUMS = 4


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """bandwidth, compute: the roofs. streaming: of weights from external memory, beside all others. sums: over devices
    and over a wafer's fabric. fixed: beside them. total: the estimate."""

    bandwidth: float = 0.0
    compute: float = 0.0
    streaming: float = 0.0
    sums: float = 0.0
    fixed: float = 0.0
    total: float = 0.0

    @property
    def binds(self) -> str:
        """The largest part, by name."""
        parts = self.parts
        return max(parts, key=parts.get)

    @property
    def parts(self) -> dict[str, float]:
        """What can bind, by the names that reports use."""
        return {
            "memory": self.bandwidth, "compute": self.compute, "streaming": self.streaming, "sums": self.sums,
            "overhead": self.fixed,
        }  # fmt: skip

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Times on stages of `cores` devices. compute: the number format of the arithmetic. streamed: layers come in from
    external memory, each while the one before it runs."""

    device: Description
    model: Model
    cores: int = 1
    compute: str = "bf16"
    streamed: bool = False

    def layer(self, layer: Layer, requests: float, context: float, share: float = 1.0) -> Seconds:
        """A step of one layer for `requests` tokens on a region of `share` of its wafer."""
        hardware, constants = self.device.hardware, self.device.constants
        devices = self.cores * share
        bandwidth = layer.bytes(requests, context) / (hardware.memory_bytes_per_s * devices)
        compute = layer.flops(requests, context) / (hardware.flops_per_s(self.compute) * devices)
        streaming = layer.weights / (hardware.external_bytes_per_s * devices) if self.streamed else 0.0
        sums = self._sums(SUMS, requests) + self._fabric(share)
        return self._seconds(bandwidth, compute, sums, constants.layer_s, streaming)

    def head(self, requests: float, devices: float) -> Seconds:
        """Logits of `requests` tokens over `devices` devices, and their embedding."""
        hardware, model = self.device.hardware, self.model
        bandwidth = model.head_read / (hardware.memory_bytes_per_s * devices)
        compute = 2.0 * requests * model.head_active / (hardware.flops_per_s(self.compute) * devices)
        sums = HEAD_SUMS * self.device.constants.collective_s if devices > 1 else 0.0
        return self._seconds(bandwidth, compute, sums, 0.0)

    def hop(self, layer: int, requests: float) -> float:
        """Seconds from the wafer of a layer to that of the next."""
        hardware = self.device.hardware
        return hardware.hop_s + requests * self.model.stream_bytes(layer) / hardware.hop_bytes_per_s

    def _seconds(self, bandwidth: float, compute: float, sums: float, fixed: float, streaming: float = 0.0) -> Seconds:
        c = self.device.constants
        roof = max(bandwidth / c.bandwidth_efficiency, compute / c.compute_efficiency)
        own = c.overhead * (roof + sums + fixed)
        return Seconds(
            bandwidth=bandwidth, compute=compute, streaming=streaming, sums=sums, fixed=own - roof - sums,
            total=max(own, streaming),
        )  # fmt: skip

    def _sums(self, count: int, requests: float) -> float:
        """`count` ring sums of the hidden vectors over the devices of a stage: 2(n − 1)/n of them cross each link."""
        if self.cores == 1:
            return 0.0
        hardware, constants = self.device.hardware, self.device.constants
        crossing = requests * self.model.hidden * ACTIVATION_BYTES * 2.0 * (self.cores - 1) / self.cores
        return count * (constants.collective_s + crossing / (constants.link_efficiency * hardware.core_bytes_per_s))

    def _fabric(self, share: float) -> float:
        """Sums over a square region of P cores: 2√P hops each."""
        fabric = self.device.hardware.fabric
        return fabric.collectives * 2.0 * math.sqrt(share * fabric.cores) * fabric.hop_s if fabric else 0.0
