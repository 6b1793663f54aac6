"""How a weight is declared: once, with the axes from which everything else about it follows.

From a `Weight` come its sharding (`Axis.mesh_axes`), the padding a mesh needs (`Axis.placed`), its bytes
(`quant.storage`), its tensor in a checkpoint (`hub`) and its random initialiser. Nothing here holds an array of
weights; `placed` returns index maps.
"""

import math
from dataclasses import dataclass

import numpy as np

# Which mesh axes each logical axis is sharded over; an axis that is not named here is replicated.
MESH_AXES = {
    "heads": ("core",),
    "kv_heads": ("core",),
    "mlp": ("core",),
    "experts": ("core",),
    "vocab": ("wafer", "core"),
}


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One logical axis of a weight.

    name: the logical name (a key of `MESH_AXES` if it is sharded). size: elements. unit: elements that stay together on
    one core, such as a head or a quantisation group. within: where the elements are in a tensor on the hub that holds
    more than this weight; None where it holds just this. padded: the hub's tensors may have further elements.
    """

    name: str
    size: int
    unit: int = 1
    within: "Within | None" = None
    padded: bool = False

    @property
    def hub_size(self) -> int:
        """Elements along this axis of the tensor on the hub."""
        return self.within.width * (self.size // self.within.run) if self.within else self.size

    def hub_index(self) -> np.ndarray:
        """Index of each element in the hub's tensor, int64 [size]."""
        element = np.arange(self.size)
        if self.within is None:
            return element
        repeat, inside = np.divmod(element, self.within.run)
        return repeat * self.within.width + self.within.start + inside

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
        step = shards * self.unit if shards > 1 else 1
        padded = -(-self.size // step) * step
        index = np.arange(padded)
        index[self.size :] = -1
        return index


@dataclass(frozen=True, kw_only=True)
class Within:
    """Runs of a fused axis: of every `width` elements the `run` from `start` on.

    A gate and an up projection with interleaved rows are Within(start=0, run=1, width=2) and Within(start=1, …); the
    first 96 of 128 elements are Within(start=0, run=96, width=128).
    """

    start: int
    run: int
    width: int


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

    name: key in the layer's weights. hub: tensor name in the hub's layout, after `model.layers.N.` for layer weights;
    "{expert}" in it stands for the index along the first axis, which is then not an axis of the hub's tensors.
    axes: outermost first; a matrix is […, outputs, inputs] as on the hub. role: what the weight policy decides by
    ("attention", "mlp", "embedding", "head", "vector"). Vectors, of any rank, are float32 under every policy.
    shift: added to a vector when it is loaded, 1 for norms whose weights are stored around zero. transposed: a float
    tensor on the hub is […, inputs, outputs]; a quantised one is not.
    """

    name: str
    hub: str
    axes: tuple[Axis, ...]
    role: str
    shift: float = 0.0
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(a.size for a in self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def matrix(self) -> bool:
        return self.role != "vector"

    @property
    def of_experts(self) -> bool:
        """Whether the first axis is the experts of a mixture, of which a token goes through a few."""
        return self.axes[0].name == "experts"

    @property
    def per_expert(self) -> bool:
        """Whether the hub holds a tensor for each index of the first axis."""
        return "{expert}" in self.hub

    @property
    def hub_shape(self) -> tuple[int, ...]:
        """Shape of the tensor (or each expert's tensor) on the hub."""
        return tuple(a.hub_size for a in self.axes[self.per_expert :])


@dataclass(frozen=True, kw_only=True)
class TokenField:
    """Rows that a mixer keeps for every token of a request: `axis` holds heads of `axis.unit` elements.

    spread: the blocks of a request are spread over the cores of its wafer, each core holding all heads; otherwise every
    core has its own heads of all blocks.
    """

    name: str
    axis: Axis
    spread: bool = False


@dataclass(frozen=True, kw_only=True)
class StateField:
    """An array that a mixer keeps for every request, of fixed size: recurrent state in float32, or `inputs`, of the
    past, in the dtype of activations."""

    name: str
    axes: tuple[Axis, ...]
    inputs: bool = False


Field = TokenField | StateField
