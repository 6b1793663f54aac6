"""Muon (K. Jordan, 2024) for the matrices of layers, AdamW for the rest, as one optax transformation.

Newton-Schulz iterations run on stacks of matrices of one shape: a few batched products, not hundreds of small ones.
"""

from collections import defaultdict

import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict
from optax.contrib import MuonDimensionNumbers, scale_by_muon

# Kept from Muon: what is looked up, read out or scores experts, and matrices of a few rows.
ADAM = ("embed_tokens", "lm_head", ".gate.weight", ".b_proj")


def optimizer(muon_rate: optax.Schedule, adam_rate: optax.Schedule, decay: float) -> optax.GradientTransformation:
    """decay: of weights that Muon updates, as a share of their rate."""
    muon = optax.chain(
        stacked(scale_by_muon(weight_dimension_numbers=lambda tree: dict.fromkeys(tree, MuonDimensionNumbers(2, 1)))),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(muon_rate),
    )
    adam = optax.adamw(adam_rate, b2=0.98, weight_decay=0.0)
    return optax.multi_transform({"muon": muon, "adam": adam}, labels)


def labels(params: dict) -> dict:
    """ "muon" or "adam" for each parameter of {module: {hub name: array}}."""

    def label(path: tuple[str, ...], array) -> str:
        name = ".".join(path)
        matrix = array.ndim >= 2 and "conv1d" not in name and "A_log" not in name
        return "muon" if matrix and not any(part in name for part in ADAM) else "adam"

    return unflatten_dict({path: label(path, array) for path, array in flatten_dict(params).items()})


def stacked(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner` on a dict of stacks [number, outputs, inputs], one for each shape of matrices, [outputs, inputs] or
    [experts, outputs, inputs]; its updates are scaled by √max(1, outputs/inputs)."""

    def gather(tree) -> dict[str, jnp.ndarray]:
        groups = defaultdict(list)
        for array in _arrays(tree).values():
            groups["x".join(map(str, array.shape[-2:]))].append(array.reshape(-1, *array.shape[-2:]))
        return {shape: jnp.concatenate(arrays) for shape, arrays in groups.items()}

    def scatter(stacks: dict[str, jnp.ndarray], like):
        start, found = defaultdict(int), {}
        for path, array in _arrays(like).items():
            shape = "x".join(map(str, array.shape[-2:]))
            count = array.size // (array.shape[-1] * array.shape[-2])
            part = stacks[shape][start[shape] : start[shape] + count].reshape(array.shape)
            found[path] = part * max(1.0, array.shape[-2] / array.shape[-1]) ** 0.5
            start[shape] += count
        return unflatten_dict({**flatten_dict(like), **found})

    def update(updates, state, params=None):
        stacks, state = inner.update(gather(updates), state)
        return scatter(stacks, updates), state

    return optax.GradientTransformation(lambda params: inner.init(gather(params)), update)


def _arrays(tree) -> dict[tuple[str, ...], jnp.ndarray]:
    """The leaves that are arrays: `multi_transform` puts masks in place of the others."""
    return {path: leaf for path, leaf in flatten_dict(tree).items() if hasattr(leaf, "shape")}
