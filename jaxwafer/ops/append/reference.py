"""Plain JAX: one scatter."""

import jax
import jax.numpy as jnp

from jaxwafer.ops.bits import to_bits
from jaxwafer.ops.pages import Pages, to_fp8


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs: never."""
    return None


def description() -> str:
    return "plain JAX"


def append(pages: Pages, layer: jax.Array, block: jax.Array, offset: jax.Array, rows: jax.Array) -> Pages:
    # A scatter drops what lies past the end but wraps what is negative.
    block = jnp.where(block < 0, pages.blocks, block)
    if pages.exponent is None:
        bits = to_bits(rows, pages.values.dtype)
        return pages.replace(values=pages.values.at[layer, block, offset].set(bits, mode="drop"))
    scaled, exponent = to_fp8(rows)
    return Pages(
        values=pages.values.at[layer, block, offset].set(to_bits(scaled, pages.values.dtype), mode="drop"),
        exponent=pages.exponent.at[layer, block, offset].set(exponent, mode="drop"),
    )
