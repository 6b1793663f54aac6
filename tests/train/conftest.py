"""Training code, ours and optax's, broadcasts and promotes as JAX does by default."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="package")
def promotion():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield
