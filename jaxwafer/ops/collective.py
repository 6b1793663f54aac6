"""Collectives that cost nothing where there is nobody to talk to."""

import jax
from jax import lax


def spanned(*axes: str) -> tuple[str, ...]:
    """Those of the mesh axes that have more than one device; inside shard_map."""
    return tuple(a for a in axes if lax.axis_size(a) > 1)


def psum(x: jax.Array, *axes: str) -> jax.Array:
    """The sum of x over mesh axes. XLA keeps a sum over one device; this leaves it out."""
    return lax.psum(x, over) if (over := spanned(*axes)) else x


def pmax(x: jax.Array, axis: str) -> jax.Array:
    """The maximum of x over a mesh axis."""
    return lax.pmax(x, axis) if spanned(axis) else x


def all_gather(x: jax.Array, axis: str, *, dim: int) -> jax.Array:
    """Every device's x along a mesh axis, joined along dimension `dim` in the order of the devices."""
    return lax.all_gather(x, axis, axis=dim, tiled=True) if spanned(axis) else x


def psum_scatter(x: jax.Array, axis: str, *, dim: int) -> jax.Array:
    """This device's share along dimension `dim` of the sum of x over a mesh axis."""
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True) if spanned(axis) else x
