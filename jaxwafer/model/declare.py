"""How a weight is declared: once, with the axes from which everything else about it follows.

From a `Weight` come its sharding (`Axis.mesh_axes`), the padding a mesh needs (`Axis.placed`), its bytes
(`quant.storage`), its tensor in a checkpoint (`hub`) and its random initialiser. Nothing here holds an array of
weights; `placed` returns index maps.
"""

from dataclasses import dataclass

import numpy as np

# Which mesh axes each logical axis is sharded over; an axis that is not named here is replicated.
MESH_AXES = {
    "heads": ("core",),
    "kv_heads": ("core",),
    "mlp": ("core",),
    "vocab": ("wafer", "core"),
}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One logical axis of a weight.

    name: the logical name (a key of `MESH_AXES` if it is sharded). size: elements in the checkpoint.
    unit: elements that stay together on one core, such as a quantisation group.
    """

    name: str
    size: int
    unit: int = 1

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        return MESH_AXES.get(self.name, ())

    def shards(self, wafers: int, cores: int) -> int:
        sizes = {"wafer": wafers, "core": cores}
        return int(np.prod([sizes[a] for a in self.mesh_axes], dtype=np.int64))

    def placed(self, shards: int) -> np.ndarray:
        """Checkpoint index of each stored element, int64 [padded size], -1 where it is padding (zero).

        >>> Axis(name="mlp", size=3).placed(2).tolist()
        [0, 1, 2, -1]
        """
        step = shards * self.unit if self.mesh_axes else 1
        padded = -(-self.size // step) * step
        index = np.arange(padded)
        index[self.size :] = -1
        return index


@dataclass(frozen=True, kw_only=True)
class HeadAxis(Axis):
    """The heads of grouped-query attention, flattened with the head dimension.

    A key/value head and the `group` query heads that read it live on one core. With more cores than key/value heads
    each is copied to ⌊cores/kv_heads⌋ cores, which share its query heads; what does not divide is padded with
    zero heads.    `name` is "heads" (queries) or "kv_heads"; `unit` is the head dimension.
    """

    kv_heads: int
    group: int

    def placed(self, shards: int) -> np.ndarray:
        kv, queries = place_heads(self.kv_heads, self.group, shards)
        heads = kv if self.name == "kv_heads" else queries.reshape(-1)
        within = np.arange(self.unit)
        index = heads[:, None] * self.unit + within
        return np.where(heads[:, None] < 0, -1, index).reshape(-1)


def place_heads(kv_heads: int, group: int, shards: int) -> tuple[np.ndarray, np.ndarray]:
    """Source key/value head of each stored one, int64 [S], and source query heads, int64 [S, per]; -1 is a zero head.

    S is a multiple of `shards`. SmolLM2's 3 × 3 heads over two cores give two groups a core, the last one empty:

    >>> kv, queries = place_heads(3, 3, 2)
    >>> kv.tolist(), queries.tolist()
    ([0, 1, 2, -1], [[0, 1, 2], [3, 4, 5], [6, 7, 8], [-1, -1, -1]])
    """
    copies = max(1, shards // kv_heads)
    per = -(-group // copies)
    used = kv_heads * copies
    stored = -(-used // shards) * shards
    slot = np.arange(stored)
    kv = np.where(slot < used, slot // copies, -1)
    within = (slot % copies)[:, None] * per + np.arange(per)
    queries = np.where((kv[:, None] >= 0) & (within < group), kv[:, None] * group + within, -1)
    return kv, queries


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A weight as its layer kind declares it.

    name: key in the layer's weights. hub: tensor name in the hub's layout, after `model.layers.N.` for layer weights.
    axes: outermost first; a matrix is [outputs, inputs] as on the hub. role: what the weight policy decides by
    ("attention", "mlp", "embedding", "head", "vector"). Vectors are kept in float32 under every policy.
    """

    name: str
    hub: str
    axes: tuple[Axis, ...]
    role: str

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class CacheField:
    """A tensor that a mixer keeps for every token of every request: its axes, per token."""

    name: str
    axes: tuple[Axis, ...]
