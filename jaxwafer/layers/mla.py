"""Multi-head latent attention, absorbed: scores and values are taken in the latent space that the cache holds.

A core computes its own heads' queries, attends with all heads over its own blocks, and keeps its own heads of what
comes out.
"""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.layers.rope import angles, rotate
from jaxwafer.model.attention import MLA
from jaxwafer.ops.collective import all_gather, pmax, psum_scatter
from jaxwafer.ops.norm import rms_norm
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.pages import Pages
from jaxwafer.ops.step import Step

# Of the norms within the mixer, whatever `rms_norm_eps` the config gives the others.
LATENT_EPS = 1e-6


def project(kind: MLA, weights: dict, layer: jax.Array, x: jax.Array, step: Step, cache: dict[str, Pages],
            ops: Operations):  # fmt: skip
    """This core's absorbed queries [B, T, heads, rank + rope_dims] (and output gate) of x [B, T, hidden], and the rows
    `latent` [B, T, 1, rank + rope_dims], the same on every core."""
    names = ["q" if kind.q_rank is None else "q_a", "kv_a", *(["gate"] if kind.gate else [])]
    q, key, *gate = ops.project(x, weights["norm"], [weights[n] for n in names], layer, eps=kind.eps)
    if kind.q_rank is not None:
        (q,) = ops.project(q.astype(x.dtype), weights["q_a_norm"], [weights["q"]], layer, eps=LATENT_EPS)
    q = q.astype(x.dtype)
    q = einops.rearrange(q, "b t (h d) -> b t h d", d=kind.nope + kind.rope_dims)
    q_nope, q_rope = jnp.split(q, (kind.nope,), axis=-1)
    key = key.astype(x.dtype)[:, :, None]
    latent, k_rope = jnp.split(key, (kind.rank,), axis=-1)
    latent = rms_norm(latent, weights["kv_a_norm"][layer], LATENT_EPS)
    if kind.rope is not None:
        cos, sin = angles(kind.rope, step.positions(x.shape[1]))
        q_rope, k_rope = (rotate(a, cos, sin, interleaved=kind.rope.interleaved) for a in (q_rope, k_rope))
    absorbed = ops.absorb(q_nope, weights["k_b"], layer, kind.rank)
    carry = {"q": jnp.concatenate([absorbed.astype(x.dtype), q_rope], axis=-1)}
    if kind.gate:
        carry["gate"] = jax.nn.sigmoid(gate[0])
    return carry, {"latent": jnp.concatenate([latent, k_rope], axis=-1)}


def exchange(kind: MLA, carry: dict) -> dict:
    """The queries of all heads, since a core's blocks are seen by every one."""
    return carry | {"all_q": all_gather(carry["q"], "core", dim=2)}


def attend(kind: MLA, weights: dict, layer: jax.Array, carry: dict, cache: dict[str, Pages], step: Step,
           ops: Operations) -> dict:  # fmt: skip
    """All heads over this core's own blocks, as parts of a softmax."""
    carry = dict(carry)
    first = jax.lax.axis_index("core").astype(jnp.int32) * cache["latent"].blocks
    highest, total, mixed = ops.latent_attention(
        carry.pop("all_q"), cache["latent"], layer, step, rank=kind.rank, scale=kind.scale, first=first
    )
    return carry | {"highest": highest, "total": total, "mixed": mixed}


def combine(kind: MLA, carry: dict) -> dict:
    """The softmax over the blocks of all cores, of this core's own heads: mixed [B, T, heads, rank] in x's dtype."""
    carry = dict(carry)
    q, highest, total, mixed = (carry.pop(n) for n in ("q", "highest", "total", "mixed"))
    top = pmax(highest, "core")
    # Where no core saw anything the maximum is −inf, and −inf − −inf is not a number.
    weight = jnp.exp(highest - jnp.where(jnp.isfinite(top), top, 0.0))
    total = psum_scatter(weight * total, "core", dim=2)
    mixed = psum_scatter(weight[..., None] * mixed, "core", dim=2)
    mixed = mixed / jnp.where(total > 0, total, 1.0)[..., None]
    return carry | {"mixed": mixed.astype(q.dtype)}


def output(kind: MLA, weights: dict, layer: jax.Array, carry: dict, ops: Operations) -> jax.Array:
    """This core's partial sum, float32 [B, T, hidden]."""
    mixed = carry["mixed"]
    values = ops.expand(mixed, weights["v_b"], layer)
    values = einops.rearrange(values, "b t h v -> b t (h v)")
    if kind.gate:
        values = values * carry["gate"]
    return ops.matmul(values.astype(mixed.dtype), weights["o"], layer)
