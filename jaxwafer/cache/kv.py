"""What the KV cache of a placed model occupies, and its allocation."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxwafer.errors import UserError
from jaxwafer.model.declare import CacheField
from jaxwafer.ops.pages import Pages
from jaxwafer.partition.placement import Placement, Stack

KV_FORMATS = {"fp8": jnp.float8_e4m3fn, "bf16": jnp.bfloat16, "f32": jnp.float32}


@dataclass(frozen=True, kw_only=True)
class KVFormat:
    """name: a key of `KV_FORMATS`."""

    name: str

    def __post_init__(self):
        if self.name not in KV_FORMATS:
            raise UserError(f"unknown KV cache format {self.name!r}; choose one of {', '.join(KV_FORMATS)}")

    @property
    def dtype(self):
        return jnp.dtype(KV_FORMATS[self.name])

    @property
    def scaled(self) -> bool:
        return self.name == "fp8"

    def row_bytes(self, head_dim: int) -> int:
        """Bytes of one head of one token, its scale included."""
        return head_dim * self.dtype.itemsize + self.scaled


@dataclass(frozen=True, kw_only=True)
class CacheShape:
    """A cache of `blocks` blocks of `block` tokens for every attention layer of a placement.

    All layers of a request use the same block numbers, so one block number stands for a block in every layer.
    """

    placement: Placement
    format: KVFormat
    block: int
    blocks: int

    def heads(self, field: CacheField) -> tuple[int, int]:
        """Stored heads over all cores, and the head dimension."""
        axis = field.axes[0]
        return len(axis.placed(self.placement.cores)) // axis.unit, axis.unit

    def token_bytes(self, stack: Stack) -> int:
        """Bytes a token takes in one layer of a stack, over all cores."""
        return sum(heads * self.format.row_bytes(dim) for heads, dim in map(self.heads, stack.kind.cache()))

    def wafer_token_bytes(self, wafer: int) -> int:
        """Bytes a token takes on a wafer's own layers."""
        return sum(len(s.layers[wafer]) * self.token_bytes(s) for s in self.placement.mixers)

    @property
    def block_bytes(self) -> int:
        """Bytes that one block allocates on each wafer: stacks are equally deep on every wafer."""
        return self.block * sum(s.depth * self.token_bytes(s) for s in self.placement.mixers)

    def abstract(self) -> tuple[dict[str, Pages], ...]:
        """For each mixer stack its fields' shapes, global: [wafers, depth, blocks, block, heads, dim]."""

        def pages(stack: Stack, field: CacheField) -> Pages:
            heads, dim = self.heads(field)
            shape = (self.placement.wafers, stack.depth, self.blocks, self.block, heads)
            exponent = jax.ShapeDtypeStruct(shape, jnp.int8) if self.format.scaled else None
            return Pages(values=jax.ShapeDtypeStruct((*shape, dim), self.format.dtype), exponent=exponent)

        return tuple({f.name: pages(s, f) for f in s.kind.cache()} for s in self.placement.mixers)


def allocate(abstract, formats):
    """Zeros of an abstract tree, made on the devices in the formats (layout, sharding) a compiled program has."""
    zeros = jax.jit(
        lambda: jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract), out_shardings=formats
    )
    return zeros()
