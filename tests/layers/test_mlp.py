"""The gated MLP."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.layers.mlp import dense_mlp
from jaxwafer.model.kinds import DenseMLP
from jaxwafer.ops.operations import Operations
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import FORMATS

HIDDEN, COLUMNS = 12, 20


def weights(columns=slice(None)) -> tuple[dict, dict]:
    """A stack of two layers as arrays, and the same as the layer takes them, of some columns."""
    rng = np.random.default_rng(0)
    shapes = {"gate": (2, COLUMNS, HIDDEN), "up": (2, COLUMNS, HIDDEN), "down": (2, HIDDEN, COLUMNS)}
    plain = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    plain["norm"] = rng.standard_normal((2, HIDDEN)).astype(np.float32)
    cut = {"gate": plain["gate"][:, columns], "up": plain["up"][:, columns], "down": plain["down"][..., columns]}
    stored = {n: QuantizedArray(jnp.asarray(a), None, None, format=FORMATS["f32"]) for n, a in cut.items()}
    return plain, stored | {"norm": jnp.asarray(plain["norm"])}


@pytest.mark.parametrize("layer", [0, 1])
def test_it_is_down_of_silu_gate_times_up_and_cores_add_up(layer):
    x = np.random.default_rng(1).standard_normal((2, 3, HIDDEN)).astype(np.float32)
    plain, _ = weights()
    kind = DenseMLP(hidden=HIDDEN, intermediate=COLUMNS, eps=1e-5)
    run = jax.jit(partial(dense_mlp, kind, step=None, ops=Operations("cpu")))
    results = [run(weights(part)[1], jnp.int32(layer), x) for part in (slice(0, 10), slice(10, None))]
    assert all(touched == 0 for _, touched in results)
    got = sum(partial_sum for partial_sum, _ in results)
    p = {n: a[layer].astype(np.float64) for n, a in plain.items()}
    h = x / np.sqrt(np.mean(x.astype(np.float64) ** 2, -1, keepdims=True) + 1e-5) * p["norm"]
    gate = h @ p["gate"].T
    np.testing.assert_allclose(got, (gate / (1 + np.exp(-gate)) * (h @ p["up"].T)) @ p["down"].T, rtol=1e-4, atol=1e-4)
