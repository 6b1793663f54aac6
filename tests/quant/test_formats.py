"""Formats and the policies that choose them."""

import ml_dtypes
import numpy as np
import pytest

from jaxwafer.errors import UserError
from jaxwafer.quant.formats import FORMATS, POLICIES, choose


@pytest.mark.parametrize(
    "name, inputs, groups, row_bytes, dtype",
    [
        ("f32", 48, 1, 48, np.float32),
        ("bf16", 48, 1, 48, ml_dtypes.bfloat16),
        ("f16", 48, 1, 48, np.float16),
        ("fp8", 48, 1, 48, ml_dtypes.float8_e4m3fn),
        ("int8", 48, 1, 48, np.int8),
        ("int8-g32", 48, 2, 64, np.int8),
        ("int4", 48, 2, 32, np.uint8),
        ("int4", 64, 2, 32, np.uint8),
        ("int4-min", 33, 2, 32, np.uint8),
        ("mxfp4", 33, 2, 32, np.uint8),
        ("int4-g32-bf16", 64, 2, 32, np.uint8),
        ("int4-g128-bf16-zero", 129, 2, 128, np.uint8),
        ("fp8-g128", 129, 2, 256, ml_dtypes.float8_e4m3fn),
    ],
)
def test_rows_are_padded_to_whole_groups(name, inputs, groups, row_bytes, dtype):
    form = FORMATS[name]
    assert (form.groups(inputs), form.row_bytes(inputs), form.numpy) == (groups, row_bytes, np.dtype(dtype))


def test_int4_scales_are_per_group_of_32_never_per_row():
    assert FORMATS["int4"].group == FORMATS["int4-min"].group == 32


@pytest.mark.parametrize(
    "policy, attention, mlp, embedding, head",
    [
        ("native", "bf16", "bf16", "bf16", "bf16"),
        ("mixed", "fp8", "int4", "int8", "int8"),
        ("int4", "int4", "int4", "int4", "int4"),
        ("fp8", "fp8", "fp8", "fp8", "fp8"),
        ("int8", "int8", "int8", "int8", "int8"),
        ("bf16", "bf16", "bf16", "bf16", "bf16"),
        ("f32", "f32", "f32", "f32", "f32"),
    ],
)
def test_a_policy_decides_by_role(policy, attention, mlp, embedding, head):
    roles = {"attention": attention, "mlp": mlp, "embedding": embedding, "head": head}
    assert {role: choose(policy, role, FORMATS["bf16"]).name for role in roles} == roles


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stored", FORMATS)
def test_vectors_are_float32_under_every_policy(policy, stored):
    assert choose(policy, "vector", FORMATS[stored]).name == "f32"


@pytest.mark.parametrize(
    "policy, stored, kept",
    [("int4", "int4-min", "int4-min"), ("mixed", "int4-min", "int4-min"), ("int8", "int8-g32", "int8-g32"),
     ("fp8", "int4-min", "fp8"), ("int4", "int8-g32", "int4"), ("bf16", "f16", "bf16"),
     ("native", "int8-g32", "int8-g32"), ("mixed", "mxfp4", "mxfp4"), ("int4", "int4-g128-bf16-zero",
     "int4-g128-bf16-zero"), ("fp8", "fp8-g128", "fp8-g128"), ("fp8", "mxfp4", "fp8")],
)  # fmt: skip
def test_a_tensor_already_of_the_asked_for_kind_is_kept_as_it_is(policy, stored, kept):
    assert choose(policy, "mlp", FORMATS[stored]).name == kept


def test_an_unknown_policy_is_refused_with_those_there_are():
    with pytest.raises(UserError, match="unknown weight policy 'int3'; choose one of native, mixed, int4"):
        choose("int3", "mlp", FORMATS["f32"])
