"""Number formats of weights, and the policies that choose one for each tensor."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxwafer.errors import UserError

E4M3_MAX, E2M1_MAX = 448.0, 6.0
# The value of each nibble (OCP Microscaling Formats 1.0, §5.3.3).
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a matrix [N outputs, K inputs] is stored.

    dtype: of the stored values; "uint4" and "float4_e2m1fn" are two to a byte along K, the low nibble the even element.
    group: inputs that share a scale; None means one scale per output, for formats that have scales.
    scale: dtype of the scales [N, K/group or 1], or None. offset: subtracted from the stored number.
    zero: an array of uint8 like the scales is subtracted in its stead: value = (stored − zero)·scale.
    minimum: a second array like the scales is added: value = (stored − offset)·scale + minimum.
    """

    name: str
    dtype: str
    group: int | None = None
    scale: str | None = None
    offset: int = 0
    zero: bool = False
    minimum: bool = False

    @property
    def packed(self) -> bool:
        return self.dtype in ("uint4", "float4_e2m1fn")

    @property
    def numpy(self) -> np.dtype:
        """dtype of the stored array (bytes, for packed formats)."""
        return np.dtype(np.uint8) if self.packed else np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    @property
    def scale_numpy(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.scale, self.scale))

    @property
    def family(self) -> str:
        """What a policy asks for: the kind of number, whatever its scales; 4-bit floats go for 4-bit integers."""
        kinds = {"uint4": "int4", "float4_e2m1fn": "int4", "int8": "int8", "float8_e4m3fn": "fp8"}
        return kinds.get(self.dtype, self.name)

    def groups(self, inputs: int) -> int:
        """Scales per output for `inputs` inputs."""
        return 1 if self.group is None else -(-inputs // self.group)

    def row_bytes(self, inputs: int) -> int:
        """Stored elements of one output's values (bytes, where packed), padded to whole groups."""
        padded = self.groups(inputs) * self.group if self.group else inputs
        return padded // 2 if self.packed else padded


def int4(group: int, scale: str, *, zero: bool = False) -> Format:
    """4-bit integers with a scale for `group` inputs, and a zero point beside it or an offset of 8."""
    if (group, scale, zero) == (32, "float16", False):
        return FORMATS["int4"]
    name = f"int4-g{group}-{SHORT[scale]}{'-zero' if zero else ''}"
    return Format(name=name, dtype="uint4", group=group, scale=scale, offset=0 if zero else 8, zero=zero)


def fp8(group: int) -> Format:
    """e4m3 with a scale for `group` inputs of an output.

    A scale of a block of outputs stands beside each of them, so that shards may cut the block: for 128 × 128 that is 4
    bytes in 132.
    """
    return Format(name=f"fp8-g{group}", dtype="float8_e4m3fn", group=group, scale="float32")


SHORT = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

# The formats that are made here, and common ones of published files; `int4` and `fp8` give others of their kinds.
FORMATS = {
    f.name: f
    for f in (
        Format(name="f32", dtype="float32"),
        Format(name="bf16", dtype="bfloat16"),
        Format(name="f16", dtype="float16"),
        Format(name="fp8", dtype="float8_e4m3fn", scale="float32"),
        Format(name="int8", dtype="int8", scale="float32"),
        Format(name="int8-g32", dtype="int8", group=32, scale="float16"),
        Format(name="int4", dtype="uint4", group=32, scale="float16", offset=8),
        Format(name="int4-min", dtype="uint4", group=32, scale="float16", minimum=True),
        Format(name="mxfp4", dtype="float4_e2m1fn", group=32, scale="float8_e8m0fnu"),
        int4(32, "bfloat16"),
        int4(128, "bfloat16", zero=True),
        fp8(128),
    )
}

# policy → role of the tensor → format; "native" keeps what the file holds.
POLICIES: dict[str, dict[str, str]] = {
    "native": {},
    "mixed": {"attention": "fp8", "mlp": "int4", "embedding": "int8", "head": "int8"},
    **{f: dict.fromkeys(("attention", "mlp", "embedding", "head"), f) for f in ("int4", "fp8", "int8", "bf16", "f32")},
}


def choose(policy: str, role: str, stored: Format) -> Format:
    """The format a tensor is kept in: the policy's, or the stored one where it already is of the asked-for kind.

    A matrix that the file holds as 4-bit blocks with a minimum therefore stays as it is under "int4" and "mixed".
    """
    if policy not in POLICIES:
        raise UserError(f"unknown weight policy {policy!r}; choose one of {', '.join(POLICIES)}")
    if role == "vector":
        return FORMATS["f32"]
    asked = POLICIES[policy].get(role)
    return stored if asked is None or stored.family == FORMATS[asked].family else FORMATS[asked]
