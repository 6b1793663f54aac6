"""Kimi K3: from its published config.json to a ModelSpec, and what it counts, by hand."""

import jax.numpy as jnp
import pytest
import tiny_k3

from jaxwafer.cache.kv import CacheShape, KVFormat
from jaxwafer.checkpoint.open import open_config
from jaxwafer.errors import UserError
from jaxwafer.model import spec_from_config
from jaxwafer.model.kinds import KDA, MLA, DenseMLP
from jaxwafer.partition.placement import place
from jaxwafer.partition.plan import uniform
from jaxwafer.quant.formats import FORMATS, choose

HIDDEN, VOCAB, HEADS = 7168, 163840, 96
# Of a layer: what each kind holds beside its norms of the hidden size.
DELTA = (
    5 * HIDDEN * HEADS * 128  # q, k, v, gate and output
    + 128 * HIDDEN + HEADS * 128 * 128  # the decay's two matrices
    + HEADS * HIDDEN  # beta
    + 3 * 4 * HEADS * 128 + HEADS * 128 + HEADS + 128  # convolutions, dt_bias, A_log, norm
)  # fmt: skip
LATENT = (
    HIDDEN * 1536 + 1536 + 1536 * HEADS * 192  # queries
    + HIDDEN * 576 + 512 + 512 * HEADS * 256  # keys and values
    + 2 * HIDDEN * HEADS * 128  # gate and output
)  # fmt: skip
EXPERT, SHARED = 3 * 3584 * 3072, 3 * HIDDEN * 6144
AROUND = 2 * HIDDEN * 3584 + 3584 + 896 * HIDDEN + 896 + SHARED  # projections, their norm, router, shared experts
DENSE = 3 * HIDDEN * 33792
# Two norms a layer, two mixtures of residuals with two vectors each; the last mixture, the last norm.
REST = 93 * 6 * HIDDEN + 3 * HIDDEN


def test_layers_as_published():
    spec = spec_from_config(open_config("kimi-k3"))
    full = [n for n, layer in enumerate(spec.layers, 1) if isinstance(layer.mixer, MLA)]
    assert full == [*range(4, 93, 4), 93] and len(spec.layers) == 93
    assert [n for n, layer in enumerate(spec.layers, 1) if isinstance(layer.mlp, DenseMLP)] == [1]
    delta = spec.layers[0].mixer
    assert isinstance(delta, KDA) and (delta.lower_bound, delta.gate_rank) == (-5.0, None)
    assert spec.layers[3].mixer.rope is None and spec.layers[3].mixer.gate
    assert spec.layers[1].mlp.activation.limits == (4.0, 25.0)
    assert (spec.residual.every, spec.residual.blocks) == (12, 8)


def test_parameters_in_all_and_of_a_token():
    """2.779T and 104.2B: of a token's the embedding is one row."""
    spec = spec_from_config(open_config("kimi-k3"))
    layers = 69 * DELTA + 24 * LATENT + DENSE + 92 * AROUND + REST
    assert spec.parameters == layers + 92 * 896 * EXPERT + 2 * VOCAB * HIDDEN == 2_779_484_476_000
    assert spec.active_parameters == layers + 92 * 16 * EXPERT + (VOCAB + 1) * HIDDEN == 104_189_619_808


def test_state_and_cache_of_a_layer():
    spec = spec_from_config(open_config("kimi-k3"))
    placed = place(spec, uniform(93, 1), lambda name, weight: choose("native", weight.role, FORMATS["bf16"]), cores=1)

    def cache(name: str) -> CacheShape:
        return CacheShape(
            placement=placed, format=KVFormat(name=name), block=1, blocks=1, dtype=jnp.dtype(jnp.bfloat16)
        )

    delta, latent = placed.mixers
    assert cache("fp8").state_bytes(delta) == 4 * HEADS * 128 * 128 + 2 * 3 * 3 * HEADS * 128 == 6_291_456 + 221_184
    assert cache("fp8").state_bytes(latent) == cache("fp8").token_bytes(delta) == 0
    assert cache("fp8").token_bytes(latent) == 576 + 1
    assert cache("bf16").token_bytes(latent) == 2 * 576


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden_act": "gelu"}, "'hidden_act' = 'gelu' is not supported"),
        ({"activation_situ_beta": None}, "lacks 'activation_situ_beta'"),
        ({"latent_moe_use_norm": False}, "'latent_moe_use_norm' = False is not supported"),
        ({"mla_use_nope": False}, "'mla_use_nope' = False is not supported"),
        ({"attn_res_block_size": -2}, "'attn_res_block_size' must be positive, not -2"),
        ({"moe_router_activation_func": "softmax"}, "'moe_router_activation_func'"),
        ({"attn_res_norm": True}, "'attn_res_norm' is not understood"),
    ],
)
def test_a_config_that_cannot_be_followed_exactly_is_refused_by_field(changes, message):
    fields = tiny_k3.config(5)
    fields["text_config"] |= changes
    with pytest.raises(UserError) as error:
        spec_from_config(fields)
    assert message in str(error.value) and "\n" not in str(error.value)
