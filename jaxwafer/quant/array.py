"""QuantizedArray: a matrix in its storage format, as a pytree that goes through jit, shard_map and device_put."""

import einops
import flax.struct
import jax
import jax.numpy as jnp

from jaxwafer.quant.formats import E2M1, Format

PARTS = ("values", "scale", "zero", "minimum")


@flax.struct.dataclass
class QuantizedArray:
    """A matrix [..., N, K] in `format`.

    values: [..., N, K], or [..., N, K/2] bytes where packed. scale, zero, minimum: [..., N, groups] or None.
    """

    values: object
    scale: object | None
    minimum: object | None
    zero: object | None = None
    format: Format = flax.struct.field(pytree_node=False, kw_only=True)

    @property
    def parts(self) -> dict:
        """Those of the arrays there are, by name."""
        return {name: part for name in PARTS if (part := getattr(self, name)) is not None}

    def __getitem__(self, index) -> "QuantizedArray":
        """The same index into the leading axes of every part."""
        return self.replace(**{name: part[index] for name, part in self.parts.items()})

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts.values())


def assemble(parts: dict, form: Format) -> QuantizedArray:
    """The inverse of `QuantizedArray.parts`."""
    return QuantizedArray(**dict.fromkeys(PARTS) | parts, format=form)


def scales_as_stored(part, form: Format):
    """Scales or minima in the dtype of the format, from an array that may hold their bits (`quant.storage.held_as`)."""
    return part if part.dtype == form.scale_numpy else jax.lax.bitcast_convert_type(part, form.scale_numpy)


def dequantize(array: QuantizedArray, dtype) -> jnp.ndarray:
    """The matrix in `dtype`, [..., N, K]; K is padded to whole groups where the format has groups.

    Values are scaled in float32: value = (stored − offset or zero)·scale + minimum.
    """
    form = array.format
    if form.scale is None:
        return array.values.astype(dtype)
    stored = unpack(array.values) if form.packed else array.values
    if form.dtype == "float4_e2m1fn":
        stored = jnp.asarray(E2M1, jnp.float32)[stored]
    grouped = einops.rearrange(stored.astype(jnp.float32), "... n (g k) -> ... n g k", g=array.scale.shape[-1])
    offset = array.zero.astype(jnp.float32)[..., None] if form.zero else float(form.offset)
    value = (grouped - offset) * scales_as_stored(array.scale, form).astype(jnp.float32)[..., None]
    if form.minimum:
        value = value + scales_as_stored(array.minimum, form).astype(jnp.float32)[..., None]
    return einops.rearrange(value, "... n g k -> ... n (g k)").astype(dtype)


def unpack(packed: jnp.ndarray) -> jnp.ndarray:
    """Nibbles of bytes [..., K/2] as uint8 [..., K], the low nibble first."""
    pair = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return einops.rearrange(pair, "... k two -> ... (k two)")
