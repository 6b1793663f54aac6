"""Weights that stay in host memory and are brought to the device layer by layer."""

from collections.abc import Sequence

import flax.struct
import jax
import jax.numpy as jnp

from jaxwafer.ops.linear_attention.form import Projected
from jaxwafer.ops.operations import Operations
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import Format

# The kind of memory that layers' weights wait in. Every platform has it; on CPUs it is the same memory.
HOST = "pinned_host"


def bring(stack: dict, position: jax.Array) -> dict:
    """A layer of a stack of weights in host memory, [1, …], on the device: a copy that XLA runs beside whatever does
    not need it, where the platform can."""

    def one(leaf):
        return jax.device_put(jax.lax.dynamic_slice_in_dim(leaf, position, 1), jax.memory.Space.Device)

    return jax.tree.map(one, stack)


@flax.struct.dataclass
class Brought:
    """A weight of one layer, [1, …], which answers for whatever layer of its stack it is asked: what runs a layer says
    one position, in the stack and in the cache."""

    array: jax.Array | QuantizedArray

    def __getitem__(self, index):
        rest = index[1:] if isinstance(index, tuple) else ()
        return self.array[(0, *rest)]

    @property
    def values(self) -> jax.Array:
        return self.array.values

    @property
    def format(self) -> Format:
        return self.array.format


class BroughtOperations:
    """`Operations` on weights that are `Brought`."""

    def __init__(self, ops: Operations):
        self._ops = ops

    def matmul(self, x: jax.Array, weight: Brought, layer: jax.Array) -> jax.Array:
        return self._ops.matmul(x, weight.array, jnp.zeros_like(layer))

    def project(self, x: jax.Array, norm: Brought, weights: Sequence[Brought], layer: jax.Array, *, eps: float):
        arrays = [weight.array for weight in weights]
        return self._ops.project(x, norm.array, arrays, jnp.zeros_like(layer), eps=eps)

    def gated(self, x: jax.Array, norm: Brought | None, gate: Brought, up: Brought, layer: jax.Array, **options):
        norm = None if norm is None else norm.array
        return self._ops.gated(x, norm, gate.array, up.array, jnp.zeros_like(layer), **options)

    def expert_matmul(self, x: jax.Array, weight: Brought, layer: jax.Array, experts: jax.Array, *,
                      of: int) -> jax.Array:  # fmt: skip
        return self._ops.expert_matmul(x, weight.array, jnp.zeros_like(layer), experts, of=of)

    def expert_gated(self, x: jax.Array, gate: Brought, up: Brought, layer: jax.Array, experts: jax.Array, **options):
        return self._ops.expert_gated(x, gate.array, up.array, jnp.zeros_like(layer), experts, **options)

    def absorb(self, x: jax.Array, weight: Brought, layer: jax.Array, inputs: int) -> jax.Array:
        return self._ops.absorb(x, weight.array, jnp.zeros_like(layer), inputs)

    def expand(self, x: jax.Array, weight: Brought, layer: jax.Array) -> jax.Array:
        return self._ops.expand(x, weight.array, jnp.zeros_like(layer))

    def linear_attention(self, projected: Projected, weights: dict[str, Brought], index: jax.Array, *rest):
        arrays = {name: weight.array for name, weight in weights.items()}
        return self._ops.linear_attention(projected, arrays, jnp.zeros_like(index), *rest)

    def __getattr__(self, name: str):
        return getattr(self._ops, name)


def brought(weights: dict) -> dict:
    """{name: weight [1, …]} → {name: `Brought`}."""
    return {name: Brought(weight) for name, weight in weights.items()}
