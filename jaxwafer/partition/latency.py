"""How long a layer, a hop and the head take: bandwidth roof, compute roof and what is added to them.

t = overhead · (max(bytes / (η_w·BW), FLOPs / (η_c·C)) + sums + fixed), after LIFE, Alpa and the TPU scaling book.
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
    """bandwidth, compute: the roofs. sums: over devices and over a wafer's fabric. fixed: beside them. total: the
    estimate."""

    bandwidth: float = 0.0
    compute: float = 0.0
    sums: float = 0.0
    fixed: float = 0.0
    total: float = 0.0

    @property
    def binds(self) -> str:
        """The largest part, by name."""
        parts = {"memory": self.bandwidth, "compute": self.compute, "sums": self.sums, "overhead": self.fixed}
        return max(parts, key=parts.get)

    def __add__(self, other: "Seconds") -> "Seconds":
        return Seconds(**{name: value + getattr(other, name) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Times on stages of `cores` devices. compute: the number format of the arithmetic."""

    device: Description
    model: Model
    cores: int = 1
    compute: str = "bf16"

    def layer(self, layer: Layer, requests: float, context: float, share: float = 1.0) -> Seconds:
        """A step of one layer for `requests` tokens on a region of `share` of its wafer."""
        hardware, constants = self.device.hardware, self.device.constants
        devices = self.cores * share
        bandwidth = layer.bytes(requests, context) / (hardware.memory_bytes_per_s * devices)
        compute = layer.flops(requests, context) / (hardware.flops_per_s(self.compute) * devices)
        return self._seconds(bandwidth, compute, self._sums(SUMS, requests) + self._fabric(share), constants.layer_s)

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

    def _seconds(self, bandwidth: float, compute: float, sums: float, fixed: float) -> Seconds:
        c = self.device.constants
        roof = max(bandwidth / c.bandwidth_efficiency, compute / c.compute_efficiency)
        total = c.overhead * (roof + sums + fixed)
        return Seconds(bandwidth=bandwidth, compute=compute, sums=sums, fixed=total - roof - sums, total=total)

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
