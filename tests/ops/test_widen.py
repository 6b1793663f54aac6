"""Numbers widened by their bits, every one of them."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jaxwafer.ops.widen import bits, e2m1, e4m3, wide_scale
from jaxwafer.quant.formats import E2M1, FORMATS


def test_every_e4m3_number():
    stored = np.arange(256, dtype=np.uint8)
    stored = stored[(stored & 0x7F) != 0x7F]  # NaN, which nothing that was clipped holds
    wanted = stored.view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    np.testing.assert_array_equal(e4m3(jnp.asarray(stored, jnp.int32)), wanted)


def test_every_nibble():
    np.testing.assert_array_equal(e2m1(jnp.arange(16)), np.array(E2M1, np.float32))


def test_every_finite_scale_but_those_too_small_to_be_normal():
    half = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    half = half[np.isfinite(half) & (np.abs(half) >= 2.0**-14)]  # XLA on CPU flushes what is below
    np.testing.assert_array_equal(wide_scale(bits(jnp.asarray(half)), FORMATS["int4"]), half.astype(np.float32))
    power = np.arange(1, 255, dtype=np.uint8).view(ml_dtypes.float8_e8m0fnu)
    found = wide_scale(bits(jnp.asarray(power)), FORMATS["mxfp4"])
    np.testing.assert_array_equal(found, power.astype(np.float32))
