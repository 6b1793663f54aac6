"""The TPU's matmul of experts, interpreted, against the reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from jaxwafer.ops.expert_matmul import reference, tpu
from jaxwafer.quant import convert
from jaxwafer.quant.formats import FORMATS

NAMES = [name for name, form in FORMATS.items() if tpu.objection(jnp.float32, form, "tpu") is None]
HELD = 5


@pytest.fixture(autouse=True)
def interpreted():
    with pltpu.force_tpu_interpret_mode():
        yield


def check(name: str, experts: list[int], shape=(7, 45)) -> None:
    rng = np.random.default_rng(0)
    weight = convert.quantize(rng.normal(size=(2, HELD, *shape)).astype(np.float32), FORMATS[name])
    weight = jax.tree.map(jnp.asarray, weight)
    x = jnp.asarray(rng.normal(size=(len(experts), shape[1])), jnp.float32)
    experts = jnp.asarray(experts, jnp.int32)
    got, want = (b.expert_matmul(x, weight, jnp.int32(1), experts, HELD, False) for b in (tpu, reference))
    np.testing.assert_allclose(got, want, atol=2e-4 if "min" in name else 5e-5)


@pytest.mark.parametrize("name", NAMES)
def test_every_format_agrees_with_the_reference(name):
    check(name, [3, 1, -1, 3, 0, HELD])


@pytest.mark.parametrize(
    "experts",
    [[2], [-1], [-1, HELD, 99], [4] * 9, [0, 1, 2, 3, 4], [4, 3, 2, 1, 0, -1, 0, 4]],
    ids=["one", "none of one", "none", "all the same", "each", "mixed"],
)
def test_any_choice_of_experts(experts):
    check("int4", experts)


def test_tiles_that_experts_share_and_experts_of_many_tiles():
    """Three tiles of rows: an expert that ends within one, one over two of them, and rows of no expert at the end."""
    rng = np.random.default_rng(1)
    experts = np.repeat([0, 2, 4, HELD], [100, 150, 30, 50])
    rng.shuffle(experts)
    check("int4", experts.tolist(), (300, 64))


def test_experts_that_no_row_names_do_not_matter():
    """Nothing of them reaches the result, though they are not numbers."""
    stack = np.random.default_rng(2).normal(size=(2, HELD, 7, 40)).astype(np.float32)
    stack[:, [0, 2]] = np.nan
    weight = jax.tree.map(jnp.asarray, convert.quantize(stack, FORMATS["f32"]))
    experts = jnp.asarray([3, -1, 1, 4, 9], jnp.int32)
    got = np.asarray(tpu.expert_matmul(jnp.ones((5, 40), jnp.float32), weight, jnp.int32(1), experts, HELD, False))
    np.testing.assert_allclose(got[[0, 2, 3]], stack[1, [3, 1, 4]].sum(-1), atol=2e-5)
    assert not got[[1, 4]].any()


def test_formats_that_the_kernel_lacks_are_left_to_the_reference():
    assert set(FORMATS) - set(NAMES) == {"f16"}
    assert tpu.objection(jnp.float32, FORMATS["int4"], "cpu") == "not made for cpu"


def test_visits_go_by_tile_and_expert():
    owner = jnp.asarray([0] * 3 + [2] * 6 + [3] * 2 + [5] * 4, jnp.int32)
    tiles, experts, begin, end = map(np.asarray, tpu._visits(owner, 5, 4, 4 + 5 - 1))
    assert tiles.tolist() == [0, 0, 1, 2, 2, 2, 2, 2]
    assert experts.tolist() == [0, 2, 2, 2, 3, 3, 3, 3]
    assert begin.tolist() == [0, 3, 3, 3, 9, 0, 0, 0]
    assert end.tolist() == [3, 9, 9, 9, 11, 0, 0, 0]
