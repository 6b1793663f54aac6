"""A linear mixer from its projections to what its output matrix takes: the signature, and the backends."""

import jax
import jax.numpy as jnp

from jaxwafer.ops import choice
from jaxwafer.ops.delta_rule import api as delta_rule
from jaxwafer.ops.linear_attention import cpu, reference
from jaxwafer.ops.linear_attention.form import Form, Projected
from jaxwafer.ops.state import State
from jaxwafer.ops.step import Step

# Tried in order. Each module has `objection(dtype, platform) -> str | None`, `description() -> str` and
# `linear_attention`, with the backend of the delta rule among its arguments. The reference objects to nothing.
BACKENDS = {"cpu": cpu, "reference": reference}


def linear_attention(projected: Projected, weights: dict[str, jax.Array], index: jax.Array, cache: dict[str, State],
                     layer: jax.Array, slot: jax.Array, step: Step, form: Form, *, backend: str,
                     recurrence: str) -> tuple[jax.Array, dict[str, State]]:  # fmt: skip
    """The gated output [B, T, H·V] in the gate's dtype, and the cache with the state and inputs of these tokens.

    With c the causal depthwise convolution, u(x) = x / √(Σ x² + 1e-6) of each head, z' = z + dt_bias:

        q' = u(SiLU(c(q))) / √K;  k' = u(SiLU(c(k)));  v' = SiLU(c(v));  g by the form of z' and a_log;  β = σ(beta)
        o = the delta rule of q', k', v', g, β (`ops.delta_rule.api`);  RMSNorm(o) ⊙ o_norm ⊙ act(gate)

    weights: stacks of layers, of which `index` is taken, float32: q_conv, k_conv [layers, G·K, 1, taps], v_conv
    [layers, H·V, 1, taps], a_log [layers, …] of H elements, dt_bias [layers, …] as z, o_norm [layers, V]. cache:
    `state` [layers, rows, H, K, V] and the past inputs q_past, k_past, v_past [layers, rows, taps − 1, …], of which
    `layer` is read and written; q, k and v are rounded to the numbers that these hold. slot: int32 [B], the row of a
    request; a negative one leaves the cache alone, and its output means nothing. A request at start 0 finds zeros.
    """
    index, layer = jnp.asarray(index, jnp.int32), jnp.asarray(layer, jnp.int32)
    run = BACKENDS[backend].linear_attention
    return run(projected, weights, index, cache, layer, slot, step, form, recurrence)


def choose(platform: str) -> str:
    """The backend on a platform: the first that does not object."""
    return choice.first(BACKENDS, jnp.float32, platform)[0]


def implementation(platform: str) -> dict[str, str]:
    """{"backend", "reason"} on a platform: of the whole, or of the delta rule in it where that alone has a kernel."""
    backend, reason = choice.first(BACKENDS, jnp.float32, platform)
    within = delta_rule.implementation(platform)
    if backend == "reference" and within["backend"] != "reference":
        return within
    return {"backend": backend, "reason": reason}
