"""Plain JAX: one scatter."""

import jax
import jax.numpy as jnp

from jaxwafer.ops.pages import Pages, as_stored


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs: never."""
    return None


def description() -> str:
    return "plain JAX"


def append(pages: Pages, layer: jax.Array, block: jax.Array, offset: jax.Array, rows: jax.Array) -> Pages:
    # A scatter drops what lies past the end but wraps what is negative.
    block = jnp.where(block < 0, pages.blocks, block)
    values, exponent = as_stored(pages, rows)
    written = pages.values.at[layer, block, offset].set(values, mode="drop")
    if exponent is None:
        return pages.replace(values=written)
    return Pages(values=written, exponent=pages.exponent.at[layer, block, offset].set(exponent, mode="drop"))
