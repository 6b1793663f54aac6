"""A partition: which layers each wafer holds, and the route that a token takes through them."""

from dataclasses import dataclass

from jaxwafer.errors import UserError


@dataclass(frozen=True)
class Visit:
    """A stop of the route: `layers`, consecutive, run on `wafer`."""

    wafer: int
    layers: tuple[int, ...]


@dataclass(frozen=True)
class Partition:
    """layers[w]: the layers on wafer w, in order; a wafer may hold none.

    route: the visits in order, where a token passes a wafer more than once; by default it passes wafers 0, 1, … once
    each.
    """

    layers: tuple[tuple[int, ...], ...]
    route: tuple[Visit, ...] = ()

    @property
    def wafers(self) -> int:
        return len(self.layers)

    @property
    def visits(self) -> tuple[Visit, ...]:
        return self.route or tuple(Visit(w, layers) for w, layers in enumerate(self.layers))

    def check(self, count: int) -> "Partition":
        """Every one of `count` layers once, in the order of the route; otherwise a UserError."""
        visits = self.visits
        if [layer for visit in visits for layer in visit.layers] != list(range(count)):
            raise UserError(f"the partition must hold layers 0 to {count - 1} once each, in order: {self.layers}")
        for wafer, layers in enumerate(self.layers):
            on = [layer for visit in visits if visit.wafer == wafer for layer in visit.layers]
            if on != list(layers):
                raise UserError(f"the route runs layers {on} on wafer {wafer}, which holds {list(layers)}")
        return self


def routed(visits: tuple[Visit, ...], wafers: int) -> Partition:
    """The partition of a route over `wafers` wafers.

    >>> routed((Visit(0, (0,)), Visit(1, (1,)), Visit(0, (2,))), 2).layers
    ((0, 2), (1,))
    """
    if any(not 0 <= visit.wafer < wafers for visit in visits):
        raise UserError(f"the route visits wafers outside 0 to {wafers - 1}")
    on = ((layer for visit in visits if visit.wafer == w for layer in visit.layers) for w in range(wafers))
    return Partition(tuple(map(tuple, on)), visits)


def circular(count: int, wafers: int, laps: int) -> Partition:
    """`count` layers in wafers · laps chunks of equal size (the first one larger), chunk c on wafer c mod wafers."""
    chunks = uniform(count, wafers * laps).layers
    return routed(tuple(Visit(c % wafers, layers) for c, layers in enumerate(chunks)), wafers)


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


def spans(layers: tuple[int, ...]) -> str:
    """Layer numbers as runs, such as "0-3,7".

    >>> spans((0, 1, 2, 3, 7)), spans(())
    ('0-3,7', 'none')
    """
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or "none"
