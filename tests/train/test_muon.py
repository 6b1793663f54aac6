"""The optimiser against optax's own Muon, one matrix at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax.contrib import MuonDimensionNumbers, muon

from jaxwafer.train.muon import labels, optimizer

SHAPES = {
    "model.layers.0": {
        "self_attn.q_proj.weight": (8, 4),
        "self_attn.k_proj.weight": (4, 8),
        "self_attn.q_conv1d.weight": (4, 1, 4),
        "block_sparse_moe.gate.weight": (3, 4),
        "block_sparse_moe.experts.{expert}.w1.weight": (3, 8, 4),
        "input_layernorm.weight": (4,),
    },
    "model.embed_tokens.weight": (6, 4),
}


def trees(seed: int):
    rng = np.random.default_rng(seed)
    shapes, structure = jax.tree.flatten(SHAPES, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(structure, [jnp.array(rng.standard_normal(s), jnp.float32) for s in shapes])


def test_which_weights_muon_updates():
    assert labels(trees(0)) == {
        "model.layers.0": {
            "self_attn.q_proj.weight": "muon",
            "self_attn.k_proj.weight": "muon",
            "self_attn.q_conv1d.weight": "adam",
            "block_sparse_moe.gate.weight": "adam",
            "block_sparse_moe.experts.{expert}.w1.weight": "muon",
            "input_layernorm.weight": "adam",
        },
        "model.embed_tokens.weight": "adam",
    }


def test_stacks_change_nothing():
    params = trees(0)
    ours = optimizer(optax.constant_schedule(0.02), optax.constant_schedule(3e-3), 0.1)
    # optax takes matrices as [inputs, outputs] unless it is told; experts are a batch.
    numbers = {
        "self_attn.q_proj.weight": MuonDimensionNumbers(1, 0),
        "self_attn.k_proj.weight": MuonDimensionNumbers(1, 0),
        "block_sparse_moe.experts.{expert}.w1.weight": MuonDimensionNumbers(2, 1),
    }
    layer = {name: numbers.get(name) for name in SHAPES["model.layers.0"]}
    theirs = muon(
        0.02, weight_decay=0.1,
        muon_weight_dimension_numbers={"model.layers.0": layer, "model.embed_tokens.weight": None},
    )  # fmt: skip
    states = ours.init(params), theirs.init(params)
    for seed in (1, 2):
        updates = []
        for number, made in enumerate((ours, theirs)):
            update, state = made.update(trees(seed), states[number], params)
            states = (state, states[1]) if number == 0 else (states[0], state)
            updates.append(update)
        for name in numbers:
            first, second = (update["model.layers.0"][name] for update in updates)
            np.testing.assert_allclose(first, second, atol=2e-5)
