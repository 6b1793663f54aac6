"""A mixer's random weights cut up as a mesh of one wafer would, and its phases run core by core."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.layers import mixers
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.state import State, write_state
from jaxwafer.ops.step import Step
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import FORMATS

DEPTH = 2  # layers in the stack


def random_weights(kind, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 [DEPTH, …] by name, as declared."""
    rng = np.random.default_rng(seed)
    return {
        w.name: (rng.standard_normal((DEPTH, *w.shape)) / (np.sqrt(w.shape[-1]) if w.matrix else 1)).astype(np.float32)
        for w in kind.weights()
    }


def pieces(array: np.ndarray, axes, cores: int, core: int) -> np.ndarray:
    """One core's shard of the last axes of an array, padding included."""
    for number, axis in enumerate(axes, array.ndim - len(axes)):
        shards = axis.shards(1, cores)
        index = axis.placed(shards)
        index = index.reshape(shards, -1)[core if shards > 1 else 0]
        array = np.where(
            (index >= 0).reshape(-1, *(1,) * (array.ndim - number - 1)), np.take(array, np.maximum(index, 0), number), 0
        )
    return array


class Core:
    """One core of `cores` with its share of a mixer's weights and state of `slots` requests."""

    def __init__(self, kind, weights: dict, *, cores: int = 1, core: int = 0, slots: int = 4):
        self.kind = kind
        self.weights = {}
        for w in kind.weights():
            shard = jnp.asarray(pieces(weights[w.name], w.axes, cores, core))
            self.weights[w.name] = QuantizedArray(shard, None, None, format=FORMATS["f32"]) if w.matrix else shard
        self.cache = {}
        for field in kind.cache():
            shape = (len(a.placed(a.shards(1, cores))) // a.shards(1, cores) for a in field.axes)
            # What a slot's last owner left.
            self.cache[field.name] = State(values=jnp.full((DEPTH, slots, *shape), 7.0, jnp.float32))

    def run(self, layer: int, x: np.ndarray, start, count, slot) -> np.ndarray:
        """Partial sums of x [B, T, hidden]; the new state is kept, but for rows with a count of 0."""
        arrays = (jnp.asarray(a, jnp.int32) for a in (layer, start, count, slot))
        out, self.cache = _run(self.kind, self.weights, self.cache, jnp.asarray(x), *arrays)
        return np.asarray(out)


@partial(jax.jit, static_argnums=0)
def _run(kind, weights, cache, x, layer, start, count, slot):
    ops, module = Operations("cpu"), mixers.module(kind)
    step = Step(start=start, count=count, table=jnp.zeros((len(x), 1), jnp.int32), slot=slot)
    carry, rows = module.project(kind, weights, layer, x, step, cache, ops)
    live = jnp.where(count > 0, slot, -1)
    cache = cache | {name: write_state(cache[name], layer, live, new) for name, new in rows.items()}
    carry, cache = module.advance(kind, weights, layer, carry, cache, live, step, ops)
    return module.output(kind, weights, layer, carry, ops), cache
