"""Where a model's weights lie on a mesh."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from support import config

from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.partition import tree
from jaxwafer.partition.placement import hub_name, place
from jaxwafer.partition.plan import Partition, uniform
from jaxwafer.quant.formats import FORMATS, choose

CARDS = Path(__file__).parents[2] / "checkpoints"


def policy(name: str, native: str = "bf16"):
    return lambda _, weight: choose(name, weight.role, FORMATS[native])


def placed(partition: Partition, cores: int = 1, formats=None, **changes):
    spec = spec_from_config(config(num_hidden_layers=sum(map(len, partition.layers)), **changes))
    return place(spec, partition, formats or policy("native"), cores=cores)


def split(*sizes: int) -> Partition:
    ends = np.cumsum(sizes)
    return Partition(tuple(tuple(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)))


def test_uneven_wafers_share_stacks_as_deep_as_the_fullest():
    got = placed(split(2, 16, 16, 14))
    assert got.slots == 16 and [s.depth for s in (*got.mixers, *got.mlps)] == [16, 16]
    np.testing.assert_array_equal(got.phases[0].mixer.stack, [[0] * n + [-1] * (16 - n) for n in (2, 16, 16, 14)])
    np.testing.assert_array_equal(got.phases[0].mixer.position[1], np.arange(16))
    layer = got.layer_bytes(got.mixers[0]) + got.layer_bytes(got.mlps[0])
    needed = [got.weight_bytes(w) for w in range(4)]
    assert needed == [n * layer + got.global_bytes for n in (2, 16, 16, 14)]
    assert got.allocated_bytes == max(needed)


@pytest.mark.parametrize(
    "partition", [Partition(((), (0, 1, 2))), Partition(((0, 1, 2), ())), Partition(((0,), (), (1, 2)))]
)
def test_a_wafer_may_hold_no_layer_and_still_holds_its_share_of_the_vocabulary(partition):
    got = placed(partition)
    for wafer, layers in enumerate(partition.layers):
        if not layers:
            assert np.all(got.phases[0].mixer.stack[wafer] == -1) and np.all(got.phases[0].mlp.stack[wafer] == -1)
            assert got.weight_bytes(wafer) == got.global_bytes > 0


def test_layers_in_different_formats_are_in_different_stacks():
    def formats(name, weight):
        wide = name.startswith(("model.layers.0.", "model.layers.3.")) and weight.role == "mlp"
        return choose("bf16" if wide else "mixed", weight.role, FORMATS["bf16"])

    got = placed(split(2, 2), formats=formats)
    assert [s.layers for s in got.mixers] == [((0, 1), (2, 3))]
    assert [s.layers for s in got.mlps] == [((0,), (3,)), ((1,), (2,))]
    assert [s.weights["up"].format.name for s in got.mlps] == ["bf16", "int4"]
    np.testing.assert_array_equal(got.phases[0].mlp.stack, [[0, 1], [1, 0]])
    np.testing.assert_array_equal(got.phases[0].mlp.position, [[0, 0], [0, 0]])
    assert [f.name for f in got.formats] == ["fp8", "bf16", "int4", "int8"]


def test_bytes_of_smollm2_on_one_device_are_those_of_its_parameters():
    """134,515,008 parameters in bfloat16, but the 61 norms of 576 in float32."""
    spec = spec_from_config(json.loads((CARDS / "smollm2-135m.json").read_text()))
    got = place(spec, uniform(30, 1), policy("native"), cores=1)
    norms = 61 * 576
    assert got.weight_bytes(0) == got.allocated_bytes == 2 * (134_515_008 - norms) + 4 * norms
    attention, mlp = got.layer_bytes(got.mixers[0]), got.layer_bytes(got.mlps[0])
    assert attention == 2 * 576 * (576 + 192 + 192 + 576) + 4 * 576
    assert mlp == 2 * 3 * 576 * 1536 + 4 * 576


def test_three_key_value_heads_over_two_cores_take_the_bytes_of_four():
    spec = spec_from_config(json.loads((CARDS / "smollm2-135m.json").read_text()))
    got = place(spec, uniform(30, 1), policy("native"), cores=2)
    # 4 groups of 5 heads (3 queries, k, v), times o, norms on both cores.
    assert got.layer_bytes(got.mixers[0]) == 2 * 576 * 64 * (12 + 4 + 4 + 12) + 2 * 4 * 576
    assert got.mixers[0].weights["q"].padding == got.mixers[0].weights["o"].padding == 0.25


@pytest.mark.parametrize("kv_heads, cores, stored", [(2, 8, 8), (4, 8, 8), (8, 8, 8), (3, 2, 4), (3, 8, 8), (3, 7, 7)])
def test_any_key_value_heads_over_any_cores_are_placed(kv_heads, cores, stored):
    got = placed(uniform(2, 1), cores=cores, num_attention_heads=kv_heads * 4, num_key_value_heads=kv_heads)
    assert len(got.mixers[0].weights["k"].index[0]) == stored * 16


def test_a_cut_that_is_not_possible_is_refused_when_planning_naming_tensor_axis_and_sizes():
    with pytest.raises(
        UserError, match=r"o_proj.weight: axis 'heads' of 96 over 6 cores gives 16 .* int4 groups of 32"
    ):
        placed(uniform(2, 1), cores=6, formats=policy("int4"))


def test_a_partition_of_another_model_is_refused():
    with pytest.raises(UserError, match="must hold layers 0 to 4"):
        place(spec_from_config(config()), uniform(4, 2), policy("native"), cores=1)


def test_names_are_the_hubs():
    spec = spec_from_config(config())
    q = next(w for w in spec.layers[0].mixer.weights() if w.name == "q")
    assert hub_name(q, 3) == "model.layers.3.self_attn.q_proj.weight"
    assert hub_name(spec.globals()[0], None) == "model.embed_tokens.weight"


@pytest.mark.parametrize("name", ["native", "mixed", "int4"])
def test_the_tree_has_the_bytes_of_the_placement(name):
    got = placed(split(3, 1, 2), cores=2, formats=policy(name))
    leaves, specs = (
        jax.tree.leaves(tree.abstract(got, "cpu")),
        jax.tree.leaves(tree.specs(got), is_leaf=lambda s: isinstance(s, P)),
    )
    total = 0
    for leaf, spec in zip(leaves, specs, strict=True):
        axes = [a for names in spec if names for a in ((names,) if isinstance(names, str) else names)]
        copies = got.wafers * got.cores // int(np.prod([{"wafer": 3, "core": 2}[a] for a in axes], dtype=int))
        total += leaf.size * leaf.dtype.itemsize * copies
    assert total == got.wafers * got.allocated_bytes


def test_the_tree_puts_wafers_and_depth_before_a_layers_axes():
    got = placed(split(3, 2), cores=2, formats=policy("int4"))
    up = tree.abstract(got, "cpu")["mlps"][0]["up"]
    assert (up.values.shape, up.scale.shape, up.minimum) == ((2, 3, 128, 32), (2, 3, 128, 2), None)
    specs = tree.specs(got)
    assert specs["mlps"][0]["up"].values == P("wafer", None, ("core",), None)
    assert specs["mlps"][0]["norm"] == P("wafer", None, None)
    assert specs["globals"]["embedding"].values == P(("wafer", "core"), None)
