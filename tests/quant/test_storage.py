"""What weights occupy on a mesh, and which cuts are refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxwafer.errors import UserError
from jaxwafer.model.declare import Axis, HeadAxis, Weight
from jaxwafer.quant.formats import FORMATS
from jaxwafer.quant.storage import store

HIDDEN = Axis(name="hidden", size=576)
COLUMNS = Axis(name="mlp", size=1536, unit=32)
UP = Weight(name="up", hub="mlp.up_proj.weight", axes=(COLUMNS, HIDDEN), role="mlp")
DOWN = Weight(name="down", hub="mlp.down_proj.weight", axes=(HIDDEN, COLUMNS), role="mlp")


def heads(kv_heads: int, group: int, dim: int, name: str = "heads") -> HeadAxis:
    count = kv_heads * (group if name == "heads" else 1)
    return HeadAxis(name=name, size=count * dim, unit=dim, kv_heads=kv_heads, group=group)


def output(kv_heads: int, group: int, dim: int) -> Weight:
    axes = (HIDDEN, heads(kv_heads, group, dim))
    return Weight(name="o", hub="self_attn.o_proj.weight", axes=axes, role="attention")


@pytest.mark.parametrize(
    "form, values, scale, nbytes",
    [
        ("f32", (1536, 576), None, 1536 * 576 * 4),
        ("bf16", (1536, 576), None, 1536 * 576 * 2),
        ("fp8", (1536, 576), (1536, 1), 1536 * (576 + 4)),
        ("int8", (1536, 576), (1536, 1), 1536 * (576 + 4)),
        ("int8-g32", (1536, 576), (1536, 18), 1536 * (576 + 36)),
        ("int4", (1536, 288), (1536, 18), 1536 * (288 + 36)),
        ("int4-min", (1536, 288), (1536, 18), 1536 * (288 + 72)),
    ],
)
def test_bytes_of_a_column_parallel_matrix_are_its_parts(form, values, scale, nbytes):
    got = store(UP, FORMATS[form], wafers=1, cores=1)
    assert got.values.shape == values
    assert (got.scale and got.scale.shape) == scale
    assert got.wafer_bytes(1, 1) == nbytes
    # Rows over cores: every part is cut, nothing is repeated.
    assert store(UP, FORMATS[form], wafers=3, cores=4).wafer_bytes(3, 4) == nbytes


def test_scales_a_group_are_cut_with_a_row_parallel_matrix_and_scales_an_output_repeated():
    grouped, whole = (store(DOWN, FORMATS[f], wafers=2, cores=4) for f in ("int4", "fp8"))
    assert grouped.scale.axes == ((), ("core",)) and grouped.scale.device_bytes(2, 4) == 576 * 12 * 2
    assert whole.scale.axes == ((), ()) and whole.scale.device_bytes(2, 4) == 576 * 4
    assert whole.wafer_bytes(2, 4) == 576 * 1536 + 4 * 576 * 4


def test_the_vocabulary_is_cut_over_the_whole_mesh():
    axes = (Axis(name="vocab", size=101), HIDDEN)
    table = Weight(name="embedding", hub="model.embed_tokens.weight", axes=axes, role="embedding")
    got = store(table, FORMATS["bf16"], wafers=3, cores=5)
    assert got.values.shape == (105, 576)
    assert got.values.device_bytes(3, 5) == 7 * 576 * 2 and got.wafer_bytes(3, 5) == 35 * 576 * 2
    assert got.padding == pytest.approx(4 / 105)


def test_a_vector_is_on_every_core():
    norm = Weight(name="norm", hub="input_layernorm.weight", axes=(HIDDEN,), role="vector")
    got = store(norm, FORMATS["f32"], wafers=2, cores=3)
    assert (got.names, got.wafer_bytes(2, 3), got.padding) == (("values",), 3 * 576 * 4, 0.0)


@pytest.mark.parametrize(
    "kv_heads, group, cores, padding",
    [
        (3, 3, 1, 0.0),
        (3, 3, 2, 1 / 4),  # a fourth, empty group
        (3, 3, 3, 0.0),
        (3, 3, 5, 2 / 5),
        (2, 4, 8, 0.0),  # queries: every head once
        (2, 3, 4, 1 / 4),  # two of three query heads a core
    ],
)
def test_padding_is_the_share_of_zero_heads(kv_heads, group, cores, padding):
    assert store(output(kv_heads, group, 64), FORMATS["bf16"], wafers=1, cores=cores).padding == pytest.approx(padding)


def test_copies_of_key_value_heads_count_as_padding():
    axes = (heads(2, 4, 64, "kv_heads"), HIDDEN)
    k = Weight(name="k", hub="self_attn.k_proj.weight", axes=axes, role="attention")
    got = store(k, FORMATS["bf16"], wafers=1, cores=8)
    assert got.values.shape == (512, 576) and got.padding == 3 / 4


@pytest.mark.parametrize("form", ["fp8", "int8", "bf16", "int4", "int8-g32"])
def test_shards_narrower_than_a_block_of_128_are_held(form):
    """18432 columns over 32 cores are 576 a core, 4½ blocks of 128; groups of 32 divide them."""
    wide = Weight(name="down", hub="mlp.down_proj.weight", axes=(HIDDEN, Axis(name="mlp", size=18432, unit=32)),
                  role="mlp")  # fmt: skip
    got = store(wide, FORMATS[form], wafers=1, cores=32)
    assert got.padding == 0.0 and len(got.index[1]) // 32 == 576


@pytest.mark.parametrize("form", ["int4", "int4-min", "int8-g32"])
@pytest.mark.parametrize(
    "kv_heads, group, dim, cores, inputs",
    [(3, 2, 16, 6, 16), (1, 3, 16, 1, None), (4, 1, 16, 4, 16), (8, 1, 80, 8, 80), (2, 3, 16, 2, 48)],
)
def test_a_cut_through_a_group_is_refused_when_planning_naming_tensor_axis_and_sizes(
    form, kv_heads, group, dim, cores, inputs
):
    weight = output(kv_heads, group, dim)
    if inputs is None:
        assert store(weight, FORMATS[form], wafers=1, cores=cores).index[1].tolist() == list(range(48))
        return
    with pytest.raises(UserError) as error:
        store(weight, FORMATS[form], wafers=1, cores=cores)
    size = kv_heads * group * dim
    assert str(error.value).startswith(
        f"self_attn.o_proj.weight: axis 'heads' of {size} over {cores} cores gives {inputs} inputs a core in units of "
        f"{dim}, which cuts the {form} groups of 32"
    )


@given(
    st.integers(1, 6), st.integers(1, 4), st.sampled_from([16, 32, 48, 64]), st.integers(1, 12),
    st.sampled_from(["int4", "int8-g32", "bf16", "fp8"]),
)  # fmt: skip
def test_what_is_not_refused_has_whole_groups_on_every_core(kv_heads, group, dim, cores, name):
    weight, form = output(kv_heads, group, dim), FORMATS[name]
    try:
        got = store(weight, form, wafers=1, cores=cores)
    except UserError:
        assert form.group
        return
    index = got.index[1]
    assert len(index) % cores == 0
    kept = index[index >= 0]
    assert sorted(kept.tolist()) == list(range(weight.shape[1]))
    if form.group:
        if cores > 1:
            assert len(index) // cores % form.group == 0
        for run in np.pad(index, (0, -len(index) % form.group), constant_values=-1).reshape(-1, form.group):
            here = run[run >= 0]
            assert len(here) in (0, form.group) or here[-1] == weight.shape[1] - 1
            assert np.all(here == here[:1] + np.arange(len(here))) and np.all(here[:1] % form.group == 0)
    assert got.values.nbytes == got.values.device_bytes(1, cores) * cores


def test_a_cut_through_a_block_of_128_inputs_is_refused_and_through_one_of_outputs_held():
    """18432 columns over 32 cores are 576 a core: rows of `up` may be cut anywhere, inputs of `down` not."""
    columns = Axis(name="mlp", size=18432, unit=32)
    up = Weight(name="up", hub="mlp.up_proj.weight", axes=(columns, HIDDEN), role="mlp")
    got = store(up, FORMATS["fp8-g128"], wafers=1, cores=32)
    assert got.scale.shape == (18432, 5) and got.scale.axes == (("core",), ())
    assert got.values.shape == (18432, 640) and got.wafer_bytes(1, 32) == 18432 * (640 + 4 * 5)
    down = Weight(name="down", hub="mlp.down_proj.weight", axes=(HIDDEN, columns), role="mlp")
    with pytest.raises(UserError) as error:
        store(down, FORMATS["fp8-g128"], wafers=1, cores=32)
    assert str(error.value).startswith(
        "mlp.down_proj.weight: axis 'mlp' of 18432 over 32 cores gives 576 inputs a core in units of 32, which cuts "
        "the fp8-g128 groups of 128"
    )
    assert store(down, FORMATS["fp8-g128"], wafers=1, cores=16).scale.device_bytes(1, 16) == 576 * 9 * 4


@pytest.mark.parametrize(
    "form, nbytes",
    [
        ("mxfp4", 1536 * (288 + 18)),
        ("int4-g32-bf16", 1536 * (288 + 36)),
        ("int4-g128-bf16-zero", 1536 * (320 + 5 * 2 + 5)),
    ],
)
def test_bytes_of_published_layouts_are_their_parts(form, nbytes):
    got = store(UP, FORMATS[form], wafers=1, cores=4)
    assert got.wafer_bytes(1, 4) == nbytes == 4 * sum(p.device_bytes(1, 4) for p in got.parts)
    assert got.names == (("values", "scale", "zero") if "zero" in form else ("values", "scale"))
