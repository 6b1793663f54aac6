"""The paged KV cache as the kernels for TPUs take it: where it lies, and with the block's tokens within a head."""

import einops
import jax

from jaxwafer.ops.main_memory import in_main_memory, in_order
from jaxwafer.ops.pages import Pages


def by_head(pages: Pages) -> list[jax.Array]:
    """Values [layers, blocks, heads, block, dim] and exponents [layers, blocks, heads, block]: the order in which tiles
    of a TPU's memory are full. The compiler keeps the cache in it, and nothing moves."""
    parts = [einops.rearrange(_ordered(pages.values), "l n s h d -> l n h s d")]
    if pages.exponent is not None:
        parts.append(einops.rearrange(_ordered(pages.exponent), "l n s h -> l n h s"))
    return [in_main_memory(part) for part in parts]


def from_by_head(parts: list[jax.Array]) -> Pages:
    """Inverse of `by_head`."""
    values, *exponent = parts
    return Pages(
        values=_ordered(einops.rearrange(values, "l n h s d -> l n s h d")),
        exponent=_ordered(einops.rearrange(*exponent, "l n h s -> l n s h")) if exponent else None,
    )


def _ordered(x: jax.Array) -> jax.Array:
    """x [layers, blocks, block, heads, ...] in that order; left to itself, XLA keeps the exponents of one head with
    blocks along the lanes."""
    return in_order(x, (0, 1, 3, 2, *range(4, x.ndim)))
