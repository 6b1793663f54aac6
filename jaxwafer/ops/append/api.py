"""Rows written into the paged KV cache, in place: the signature, and the backends."""

import jax
import jax.numpy as jnp

from jaxwafer.ops import choice
from jaxwafer.ops.append import reference, tpu
from jaxwafer.ops.pages import Pages

# Tried in order. Each module has `objection(dtype, platform) -> str | None`, `description() -> str` and `append`. The
# reference objects to nothing.
BACKENDS = {"tpu": tpu, "reference": reference}


def append(pages: Pages, layer: jax.Array, block: jax.Array, offset: jax.Array, rows: jax.Array, *,
           backend: str) -> Pages:  # fmt: skip
    """Write rows [B, T, heads, head_dim] at (block, offset), int32 [B, T]; a block outside the pages is dropped.

    A request's rows are of consecutive tokens, and no two requests write to the same block. A donated cache is updated
    in place.
    """
    return BACKENDS[backend].append(pages, layer, block, offset, rows)


def choose(platform: str) -> str:
    """The backend on a platform: the first that does not object."""
    return choice.first(BACKENDS, jnp.float32, platform)[0]


def implementation(platform: str) -> dict[str, str]:
    """{"backend", "reason"} on a platform."""
    return dict(zip(("backend", "reason"), choice.first(BACKENDS, jnp.float32, platform), strict=True))
