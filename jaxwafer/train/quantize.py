"""Quantisation-aware training: the values that the exported file will hold, with the gradient of the trained ones."""

import re

import jax
import jax.numpy as jnp

from jaxwafer.quant.formats import Format, int4

FORM = int4(32, "bfloat16")
# Modules that stay in bfloat16, as patterns of compressed-tensors: routers, head, and what makes decays and gates.
IGNORE = ("lm_head", r"re:.*\.gate$", r"re:.*\.(b|f_a|f_b|g_a|g_b)_proj$")
# Tensors that are float32 on the hub.
WIDE = ("A_log", "dt_bias", "e_score_correction_bias")


def quantized(name: str) -> bool:
    """Whether the tensor of this hub name is a matrix that is stored in int4."""
    module = name.removesuffix(".weight")
    linear = name.endswith((*(f"{n}_proj.weight" for n in ("gate", "up", "down", "q", "k", "v", "o", "kv_b")),
                            "kv_a_proj_with_mqa.weight", "w1.weight", "w2.weight", "w3.weight"))  # fmt: skip
    return linear and not any(re.match(pattern.removeprefix("re:"), module) for pattern in IGNORE)


def rounded(params: dict, amount: jax.Array) -> dict:
    """Parameters, {module: {hub name: array}}, as the file will hold them where `amount` is 1, as they are where it is
    0; the rounding has a gradient of one."""

    def leaf(path: tuple, x: jax.Array) -> jax.Array:
        name = path[-1].key
        if name.endswith(WIDE):
            return x
        value = group_rounded(x, FORM) if quantized(name) else x.astype(jnp.bfloat16).astype(jnp.float32)
        return x + amount * jax.lax.stop_gradient(value - x)

    return jax.tree_util.tree_map_with_path(leaf, params)


def group_rounded(x: jax.Array, form: Format) -> jax.Array:
    """x [..., N, K] through symmetric 4-bit groups, as `quant.convert.quantize` rounds."""
    grouped = x.reshape(*x.shape[:-1], -1, form.group)
    largest = jnp.max(jnp.abs(grouped), axis=-1, keepdims=True)
    # By one number XLA would multiply with its rounded inverse instead, and now and then round to another scale.
    sevens = 0 * largest + 7
    scale = (largest / sevens).astype(form.scale).astype(jnp.float32)
    ratio = jnp.where(scale != 0, grouped / jnp.where(scale != 0, scale, 1.0), 0.0)
    return (jnp.clip(jnp.round(ratio), -7, 7) * scale).reshape(x.shape)
