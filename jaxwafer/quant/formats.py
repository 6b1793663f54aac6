"""Number formats of weights, and the policies that choose one for each tensor."""

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from jaxwafer.errors import UserError

E4M3_MAX = 448.0


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a matrix [N outputs, K inputs] is stored.

    dtype: of the stored values; "uint4" is two to a byte along K, the low nibble the even element.
    group: inputs that share a scale; None means one scale per output, for formats that have scales.
    scale: dtype of the scales [N, K/group or 1], or None. offset: subtracted from the stored integer.
    minimum: a second array like the scales is added: value = (stored − offset)·scale + minimum.
    """

    name: str
    dtype: str
    group: int | None = None
    scale: str | None = None
    offset: int = 0
    minimum: bool = False

    @property
    def packed(self) -> bool:
        return self.dtype == "uint4"

    @property
    def numpy(self) -> np.dtype:
        """dtype of the stored array (bytes, for packed formats)."""
        return np.dtype(np.uint8) if self.packed else np.dtype(getattr(ml_dtypes, self.dtype, self.dtype))

    @property
    def scale_numpy(self) -> np.dtype:
        return np.dtype(getattr(ml_dtypes, self.scale, self.scale))

    @property
    def family(self) -> str:
        """What a policy asks for: the kind of number, whatever the grouping of its scales."""
        return {"uint4": "int4", "int8": "int8", "float8_e4m3fn": "fp8"}.get(self.dtype, self.name)

    def groups(self, inputs: int) -> int:
        """Scales per output for `inputs` inputs."""
        return 1 if self.group is None else -(-inputs // self.group)

    def row_bytes(self, inputs: int) -> int:
        """Stored elements of one output's values (bytes, where packed), padded to whole groups."""
        padded = self.groups(inputs) * self.group if self.group else inputs
        return padded // 2 if self.packed else padded


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
    wanted = FORMATS[POLICIES[policy].get(role, stored.name)]
    return stored if stored.family == wanted.family else wanted
