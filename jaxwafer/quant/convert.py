"""Conversion between formats on the host, one tensor at a time (NumPy)."""

import einops
import ml_dtypes
import numpy as np

from jaxwafer.errors import UserError
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import E2M1, E2M1_MAX, E4M3_MAX, FORMATS, Format


def pack(nibbles: np.ndarray) -> np.ndarray:
    """uint8 values below 16, [..., K] → bytes [..., K/2], the even element in the low nibble."""
    pair = einops.rearrange(nibbles, "... (k two) -> ... k two", two=2)
    return pair[..., 0] | (pair[..., 1] << 4)


def unpack(packed: np.ndarray) -> np.ndarray:
    """Inverse of `pack`."""
    pair = np.stack([packed & 0xF, packed >> 4], axis=-1)
    return einops.rearrange(pair, "... k two -> ... (k two)")


def dense(array: np.ndarray) -> QuantizedArray:
    """A float32, bfloat16 or float16 array as a QuantizedArray in the format of its dtype."""
    for form in FORMATS.values():
        if form.scale is None and array.dtype == form.numpy:
            return QuantizedArray(array, None, None, format=form)
    raise UserError(f"cannot store weights of dtype {array.dtype}")


def dequantize(array: QuantizedArray) -> np.ndarray:
    """The matrix as float32 [..., N, K]; K is padded to whole groups where the format has groups."""
    form = array.format
    if form.scale is None:
        return np.asarray(array.values, np.float32)
    stored = unpack(array.values) if form.packed else array.values
    if form.dtype == "float4_e2m1fn":
        stored = np.array(E2M1, np.float32)[stored]
    grouped = einops.rearrange(np.asarray(stored, np.float32), "... n (g k) -> ... n g k", g=array.scale.shape[-1])
    offset = np.asarray(array.zero, np.float32)[..., None] if form.zero else form.offset
    value = (grouped - offset) * np.asarray(array.scale, np.float32)[..., None]
    if form.minimum:
        value += np.asarray(array.minimum, np.float32)[..., None]
    return einops.rearrange(value, "... n g k -> ... n (g k)")


def quantize(matrix: np.ndarray, form: Format) -> QuantizedArray:
    """A float32 matrix [..., N, K] in `form`; K is padded with zeros to whole groups.

    Symmetric scales are amax/7 (4 bits), amax/127 (8 bits) and amax/448 (e4m3) of the group or output, rounded to the
    scale's dtype before the values are divided by it. With a minimum: scale (max − min)/15; with a zero point the same,
    of a range that has 0 in it. e2m1: 2^(⌊log2 amax⌋ − 2) (OCP Microscaling Formats 1.0, §6.3).
    """
    if form.scale is None:
        return QuantizedArray(matrix.astype(form.numpy), None, None, format=form)
    inputs = matrix.shape[-1]
    groups = form.groups(inputs)
    if form.group:
        matrix = np.pad(matrix, [(0, 0)] * (matrix.ndim - 1) + [(0, groups * form.group - inputs)])
    grouped = einops.rearrange(matrix, "... n (g k) -> ... n g k", g=groups)
    if form.minimum:
        low = grouped.min(-1).astype(form.scale_numpy)
        span = grouped.max(-1) - low.astype(np.float32)
        scale = (span / 15).astype(form.scale_numpy)
        minimum, shifted = low, grouped - low.astype(np.float32)[..., None]
    elif form.zero:
        low = np.minimum(grouped.min(-1), 0)
        scale = ((np.maximum(grouped.max(-1), 0) - low) / 15).astype(form.scale_numpy)
        minimum, shifted = None, grouped
    elif form.dtype == "float4_e2m1fn":
        # frexp gives the exponent of a mantissa in [½, 1); e8m0 has no 0, so a group of zeros takes the smallest scale.
        exponent = np.frexp(np.abs(grouped).max(-1))[1] - 3
        scale = np.ldexp(np.float32(1), np.clip(exponent, -126, 127)).astype(form.scale_numpy)
        minimum, shifted = None, grouped
    else:
        top = {"uint4": 7.0, "int8": 127.0, "float8_e4m3fn": E4M3_MAX}[form.dtype]
        scale = (np.abs(grouped).max(-1) / top).astype(form.scale_numpy)
        minimum, shifted = None, grouped
    wide = scale.astype(np.float32)[..., None]
    ratio = np.divide(shifted, wide, out=np.zeros_like(shifted), where=wide != 0)
    zero = None
    if form.dtype == "float8_e4m3fn":
        # The conversion gives NaN, not the largest value, beyond 464.
        stored = np.clip(ratio, -E4M3_MAX, E4M3_MAX).astype(ml_dtypes.float8_e4m3fn)
    elif form.dtype == "float4_e2m1fn":
        stored = np.clip(ratio, -E2M1_MAX, E2M1_MAX).astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    elif form.zero:
        level = np.divide(-low[..., None], wide, out=np.zeros_like(wide), where=wide != 0)
        zero = np.clip(np.rint(level), 0, 15).astype(np.uint8)
        stored = np.clip(np.rint(ratio) + zero, 0, 15).astype(np.uint8)
        zero = zero[..., 0]
    elif form.packed:
        low, high = (0, 15) if form.minimum else (-7, 7)
        stored = (np.clip(np.rint(ratio), low, high) + form.offset).astype(np.uint8)
    else:
        stored = np.clip(np.rint(ratio), -127, 127).astype(np.int8)
    stored = einops.rearrange(stored, "... n g k -> ... n (g k)")
    return QuantizedArray(pack(stored) if form.packed else stored, scale, minimum, zero, format=form)


def convert(array: QuantizedArray, form: Format, inputs: int) -> QuantizedArray:
    """`array`, whose matrix has `inputs` inputs, in another format; the same object where nothing changes."""
    if array.format == form:
        return array
    return quantize(dequantize(array)[..., :inputs], form)
