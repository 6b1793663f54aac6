"""A partition: which layers each wafer holds."""

from dataclasses import dataclass

from jaxwafer.errors import UserError


@dataclass(frozen=True)
class Partition:
    """layers[w]: the layers on wafer w, in order. A wafer may hold none; wafers follow one another in the pipeline."""

    layers: tuple[tuple[int, ...], ...]

    @property
    def wafers(self) -> int:
        return len(self.layers)

    def check(self, count: int) -> "Partition":
        """Every one of `count` layers once, in order; otherwise a UserError."""
        if [layer for wafer in self.layers for layer in wafer] != list(range(count)):
            raise UserError(f"the partition must hold layers 0 to {count - 1} once each, in order: {self.layers}")
        return self


def uniform(count: int, wafers: int) -> Partition:
    """Equal layer counts, the first wafers taking one more where `count` does not divide.

    >>> [len(w) for w in uniform(30, 4).layers]
    [8, 8, 7, 7]
    """
    small, larger = divmod(count, wafers)
    layers, first = [], 0
    for wafer in range(wafers):
        size = small + (wafer < larger)
        layers.append(tuple(range(first, first + size)))
        first += size
    return Partition(tuple(layers))
