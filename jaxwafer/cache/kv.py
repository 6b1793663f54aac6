"""What the caches of a placed model occupy, and their allocation: KV blocks, and each request's recurrent state."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxwafer.model.declare import Field, StateField, TokenField
from jaxwafer.ops.bits import stored_as
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.state import State
from jaxwafer.partition.placement import Placement, Stack
from jaxwafer.quant.fields import KV_DTYPES, check_kv_format, row_bytes, state_bytes, stored_size, token_bytes


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    """name: a key of `quant.fields.KV_DTYPES`."""

    name: str

    def __post_init__(self):
        check_kv_format(self.name)

    @property
    def dtype(self):
        """In which it is stored."""
        return stored_as(KV_DTYPES[self.name])

    @property
    def scaled(self) -> bool:
        return self.name == "fp8"

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one head of one token, its scale included."""
        return row_bytes(self.name, head_dim)


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """A cache of `blocks` blocks of `block` tokens for every attention layer, and `rows` rows of recurrent state.

    All layers of a request use the same block numbers, so one block number stands for a block in every layer. Where a
    field spreads its blocks over cores, `blocks` is a multiple of the cores (`even_blocks`). dtype: of activations.
    """

    placement: Placement
    format: KVFormat
    block: int
    blocks: int
    rows: int = 1
    dtype: jnp.dtype = jnp.dtype(jnp.float32)

    def heads(self, field: TokenField) -> tuple[int, int]:
        """Stored heads over all cores, and the head dimension."""
        axis = field.axis
        return stored_size(axis, self.placement.wafers, self.placement.cores) // axis.unit, axis.unit

    def token_bytes(self, stack: Stack) -> int:
        """Bytes a token takes in one layer of a stack, over all cores."""
        return token_bytes(stack.kind.cache(), self.format.name, self.placement.wafers, self.placement.cores)

    def state_bytes(self, stack: Stack) -> int:
        """Bytes of state a request takes in one layer of a stack, over all cores."""
        return state_bytes(stack.kind.cache(), self.dtype.itemsize, self.placement.wafers, self.placement.cores)

    def wafer_token_bytes(self, wafer: int) -> int:
        """Bytes a token takes on a wafer's own layers."""
        return sum(len(s.layers[wafer]) * self.token_bytes(s) for s in self.placement.mixers)

    def wafer_state_bytes(self, wafer: int) -> int:
        """Bytes of state a request takes on a wafer's own layers."""
        return sum(len(s.layers[wafer]) * self.state_bytes(s) for s in self.placement.mixers)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block allocates on each wafer: stacks are equally deep on every wafer."""
        return self.block * sum(s.depth * self.token_bytes(s) for s in self.placement.mixers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks and rows on each wafer."""
        rows = self.rows * sum(s.depth * self.state_bytes(s) for s in self.placement.mixers)
        return self.blocks * self.block_bytes + rows

    def _state_dtype(self, field: StateField) -> jnp.dtype:
        return stored_as(self.dtype if field.inputs else jnp.float32)

    def _state_shape(self, field: StateField) -> tuple[int, ...]:
        return tuple(stored_size(axis, self.placement.wafers, self.placement.cores) for axis in field.axes)

    def abstract(self) -> tuple[dict[str, Pages | State], ...]:
        """For each mixer stack its fields' shapes, global: [wafers · depth, blocks, block, heads, dim] for tokens,
        [wafers · depth, rows, …] for state.

        Wafers have no axis of their own: a device would have to take off one of one element, and where another axis has
        one element too (a head), XLA takes off the wrong one and copies the cache to make up for it.
        """

        def field(stack: Stack, declared: Field) -> Pages | State:
            layers = self.placement.wafers * stack.depth
            if isinstance(declared, StateField):
                shape = (layers, self.rows, *self._state_shape(declared))
                return State(values=jax.ShapeDtypeStruct(shape, self._state_dtype(declared)))
            heads, dim = self.heads(declared)
            shape = (layers, self.blocks, self.block, heads)
            exponent = jax.ShapeDtypeStruct(shape, jnp.int8) if self.format.scaled else None
            return Pages(values=jax.ShapeDtypeStruct((*shape, dim), self.format.dtype), exponent=exponent)

        return tuple({f.name: field(s, f) for f in s.kind.cache()} for s in self.placement.mixers)

    def specs(self) -> tuple[dict[str, Pages | State], ...]:
        """The PartitionSpec of every array of `abstract`."""

        def field(declared: Field) -> Pages | State:
            if isinstance(declared, StateField):
                axes = (a.mesh_axes or None for a in declared.axes)
                return State(values=PartitionSpec("wafer", None, *axes))
            spread = PartitionSpec("wafer", "core")
            spec = spread if declared.spread else PartitionSpec("wafer", None, None, "core")
            return Pages(values=spec, exponent=spec if self.format.scaled else None)

        return tuple({f.name: field(f) for f in s.kind.cache()} for s in self.placement.mixers)


def block_shards(placement: Placement) -> int:
    """Among how many cores the blocks of a wafer are divided: 1 where every core has its own heads of all blocks."""
    spread = any(getattr(f, "spread", False) for s in placement.mixers for f in s.kind.cache())
    return placement.cores if spread else 1


def even_blocks(placement: Placement, blocks: int) -> int:
    """`blocks`, rounded up to a multiple of `block_shards`."""
    shards = block_shards(placement)
    return -(-blocks // shards) * shards


def allocate(abstract, formats):
    """Zeros of an abstract tree, made on the devices in the formats (layout, sharding) a compiled program has."""
    zeros = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=formats
    )
    return zeros()
