"""What training rounds to, against what the exporter writes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxwafer.model import spec_from_config
from jaxwafer.quant.convert import dequantize, quantize
from jaxwafer.train.loop import CONFIG
from jaxwafer.train.quantize import FORM, quantized, rounded


def test_groups_are_rounded_as_the_file_stores_them():
    x = np.random.default_rng(0).standard_normal((3, 6, 96)).astype(np.float32)
    x[0, 0, :32] = 0.0
    values = rounded({"m": {"x.w1.weight": jnp.array(x)}}, jnp.float32(1))["m"]["x.w1.weight"]
    np.testing.assert_array_equal(values, dequantize(quantize(x, FORM)))


@pytest.mark.parametrize(
    "name, dtype", [("input_layernorm.weight", ml_dtypes.bfloat16), ("self_attn.A_log", np.float32)]
)
def test_other_tensors_are_rounded_to_what_the_file_holds(name, dtype):
    x = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    values = rounded({"m": {name: jnp.array(x)}}, jnp.float32(1))["m"][name]
    np.testing.assert_allclose(values, x.astype(dtype).astype(np.float32), atol=1e-7)


def test_nothing_is_rounded_at_first_and_the_gradient_is_one():
    x = jnp.array(np.random.default_rng(0).standard_normal((2, 32)), jnp.float32)
    tree = {"m": {"x.q_proj.weight": x}}
    np.testing.assert_array_equal(rounded(tree, jnp.float32(0))["m"]["x.q_proj.weight"], x)
    grad = jax.grad(lambda t: jnp.sum(jnp.square(rounded(t, jnp.float32(1))["m"]["x.q_proj.weight"])))(tree)
    np.testing.assert_allclose(grad["m"]["x.q_proj.weight"], 2 * dequantize(quantize(np.asarray(x), FORM)), rtol=1e-6)


def test_which_matrices_are_int4():
    spec = spec_from_config(dict(CONFIG))
    names = {w.hub: w for layer in spec.layers for part in (layer.mixer, layer.mlp) for w in part.weights()}
    kept = {hub for hub, w in names.items() if w.matrix and not quantized(hub)}
    assert kept == {f"self_attn.{n}_proj.weight" for n in ("b", "f_a", "f_b", "g_a", "g_b")}
    assert not any(quantized(hub) for hub, w in names.items() if not w.matrix)
    assert not quantized("lm_head.weight") and not quantized("model.embed_tokens.weight")
    assert all(w.hub_shape[-1] % FORM.group == 0 for hub, w in names.items() if quantized(hub))
