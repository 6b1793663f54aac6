"""QuantizedArray: a matrix in its storage format, as a pytree that goes through jit, shard_map and device_put."""

import einops
import flax.struct
import jax.numpy as jnp

from jaxwafer.quant.formats import Format


@flax.struct.dataclass
class QuantizedArray:
    """A matrix [..., N, K] in `format`.

    values: [..., N, K], or [..., N, K/2] bytes where packed. scale, minimum: [..., N, groups] or None.
    """

    values: object
    scale: object | None
    minimum: object | None
    format: Format = flax.struct.field(pytree_node=False)

    def __getitem__(self, index) -> "QuantizedArray":
        """The same index into the leading axes of every part."""
        part = [None if p is None else p[index] for p in (self.values, self.scale, self.minimum)]
        return QuantizedArray(*part, format=self.format)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in (self.values, self.scale, self.minimum) if p is not None)


def dequantize(array: QuantizedArray, dtype) -> jnp.ndarray:
    """The matrix in `dtype`, [..., N, K]; K is padded to whole groups where the format has groups.

    Values are scaled in float32: value = (stored − offset)·scale + minimum.
    """
    form = array.format
    if form.scale is None:
        return array.values.astype(dtype)
    stored = unpack(array.values).astype(jnp.float32) if form.packed else array.values.astype(jnp.float32)
    grouped = einops.rearrange(stored - float(form.offset), "... n (g k) -> ... n g k", g=array.scale.shape[-1])
    value = grouped * array.scale.astype(jnp.float32)[..., None]
    if form.minimum:
        value = value + array.minimum.astype(jnp.float32)[..., None]
    return einops.rearrange(value, "... n g k -> ... n (g k)").astype(dtype)


def unpack(packed: jnp.ndarray) -> jnp.ndarray:
    """Nibbles of bytes [..., K/2] as uint8 [..., K], the low nibble first."""
    pair = jnp.stack([packed & 0xF, packed >> 4], axis=-1)
    return einops.rearrange(pair, "... k two -> ... (k two)")
