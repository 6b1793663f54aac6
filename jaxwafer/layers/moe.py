"""Mixtures of experts: whole experts on each core, the columns of shared experts over all cores.

A plain mixture is one function. Where the experts work on a latent of x, its projections are cut over cores too: the
slices of the latent are gathered before the experts run, and their weighted sums added up before the latent's norm.
"""

import einops
import jax
import jax.numpy as jnp

from jaxwafer.model.mlp import MoE, Router
from jaxwafer.ops.activation import activate
from jaxwafer.ops.collective import psum, spanned
from jaxwafer.ops.norm import rms_norm
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.step import Step


def phases(kind: MoE) -> tuple:
    """The functions of `layers.mlps.phases`."""
    return (enter, gather, latent_mixture, add_up, leave) if kind.latent else (moe,)


def moe(kind: MoE, weights: dict, layer: jax.Array, x: jax.Array, step: Step, ops: Operations):
    """Mixture of x [B, T, hidden]: this core's partial sum, and how many experts it read."""
    normed = rms_norm(x, weights["norm"][layer], kind.eps)
    chosen, shares = _route(kind, weights, layer, normed, ops)
    partial, touched = mixture(kind, weights, layer, normed, chosen, shares, step, ops)
    return partial + shared(kind, weights, layer, normed, ops), touched


def enter(kind: MoE, weights: dict, layer: jax.Array, x: jax.Array, step: Step, ops: Operations) -> dict:
    """The routing, the shared experts' partial sum, and this core's slice of the latent."""
    normed = rms_norm(x, weights["norm"][layer], kind.eps)
    chosen, shares = _route(kind, weights, layer, normed, ops)
    latent = ops.matmul(normed, weights["latent_down"], layer).astype(x.dtype)
    return {"latent": latent, "chosen": chosen, "shares": shares, "shared": shared(kind, weights, layer, normed, ops)}


def gather(kind: MoE, carry: dict) -> dict:
    """The whole latent on every core, without the padding that follows the last slice."""
    latent = carry["latent"]
    if spanned("core"):
        latent = jax.lax.all_gather(latent, "core", axis=latent.ndim - 1, tiled=True)
    return carry | {"latent": latent[..., : kind.latent]}


def latent_mixture(kind: MoE, weights: dict, layer: jax.Array, carry: dict, step: Step, ops: Operations) -> dict:
    """This core's part of the weighted sum of experts of the latent."""
    chosen, shares = carry["chosen"], carry["shares"]
    mixed, touched = mixture(kind, weights, layer, carry["latent"], chosen, shares, step, ops)
    return {"mixed": mixed, "touched": touched, "shared": carry["shared"]}


def add_up(kind: MoE, carry: dict) -> dict:
    """The weighted sum of all cores' experts."""
    return carry | {"mixed": psum(carry["mixed"], "core")}


def leave(kind: MoE, weights: dict, layer: jax.Array, carry: dict, step: Step, ops: Operations):
    """This core's partial sum, and how many experts it read."""
    down = weights["latent_down"]
    normed = rms_norm(carry["mixed"], weights["latent_norm"][layer], kind.eps)
    # This core's slice, as `enter` made it.
    width = down.values.shape[-2]
    start = jax.lax.axis_index("core") * width
    padded = jnp.pad(normed, ((0, 0), (0, 0), (0, jax.lax.axis_size("core") * width - kind.latent)))
    mine = jax.lax.dynamic_slice_in_dim(padded, start, width, axis=2)
    return ops.matmul(mine, weights["latent_up"], layer) + carry["shared"], carry["touched"]


def _route(
    kind: MoE, weights: dict, layer: jax.Array, normed: jax.Array, ops: Operations
) -> tuple[jax.Array, jax.Array]:
    # The layer's number waits for x, or a TPU's XLA reads the routers of all layers ahead, and writes them out again.
    wide, layer = jax.lax.optimization_barrier((normed.astype(jnp.float32), layer))
    logits = ops.matmul(wide, weights["router"], layer)
    bias = weights["router_bias"][layer] if kind.router.bias or kind.router.logit_bias else None
    return route(kind.router, logits, bias)


def route(router: Router, logits: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """The experts of each token, int32 [B, T, chosen], and their weights, float32 of the same shape.

    logits: float32 [B, T, experts]. bias: [experts], where `router` has one. DeepSeek-V3, arXiv 2412.19437, eq. 12–16
    for "sigmoid" with a bias; its groups as in DeepSeek-V2, §2.2.2, ranked by their two best experts.
    """
    if router.logit_bias:
        logits = logits + bias[None, None]
    if router.score == "softmax-chosen":
        best, chosen = jax.lax.top_k(logits, router.chosen)
        return chosen, jax.nn.softmax(best, axis=-1) * router.scale
    scores = jax.nn.softmax(logits, axis=-1) if router.score == "softmax" else jax.nn.sigmoid(logits)
    ranked = scores + bias[None, None] if router.bias else scores
    if router.groups > 1:
        grouped = einops.rearrange(ranked, "b t (g e) -> b t g e", g=router.groups)
        value = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
        _, best = jax.lax.top_k(value, router.kept_groups)
        kept = jnp.any(best[..., None] == jnp.arange(router.groups, dtype=best.dtype)[None, None, None], axis=2)
        ranked = einops.rearrange(jnp.where(kept[..., None], grouped, -jnp.inf), "b t g e -> b t (g e)")
    _, chosen = jax.lax.top_k(ranked, router.chosen)
    shares = jnp.take_along_axis(scores, chosen, axis=-1)
    if router.renormalize:
        shares = shares / (jnp.sum(shares, axis=-1, keepdims=True) + 1e-20)
    return chosen, shares * router.scale


def mixture(kind: MoE, weights: dict, layer: jax.Array, x: jax.Array, chosen: jax.Array, shares: jax.Array, step: Step,
            ops: Operations) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """The weighted sum over a token's experts that this core holds, float32 like x [B, T, width], and how many experts
    it read, a float32 scalar. Pad tokens have no experts."""
    count = weights["gate"].values.shape[1]
    local = chosen - jax.lax.axis_index("core") * count
    mine = (local >= 0) & (local < count) & step.real(x.shape[1])[..., None]
    experts = jnp.where(mine, local, -1).reshape(-1)
    rows = einops.rearrange(x, "b t d -> (b t) d")

    def project(rows: jax.Array, name: str) -> jax.Array:
        out = ops.expert_matmul(rows, weights[name], layer, experts, of=kind.experts)
        return out + weights[f"{name}_bias"][layer, experts] if kind.expert_bias else out

    gate, up = weights["gate"], weights["up"]
    if kind.expert_bias or gate.format != up.format:
        rows = jnp.repeat(rows, kind.router.chosen, axis=0)
        joined = activate(kind.activation, project(rows, "gate"), project(rows, "up"))
    else:
        joined = ops.expert_gated(rows, gate, up, layer, experts, activation=kind.activation, of=kind.experts)
    joined = joined.astype(x.dtype)
    each = einops.rearrange(project(joined, "down"), "(b t k) d -> b t k d", t=x.shape[1], k=kind.router.chosen)
    # Expert biases went to rows of other cores' experts too; their share here is nothing.
    partial = jnp.einsum("btkd,btk->btd", each, jnp.where(mine, shares, 0.0), precision="highest")
    read = jnp.zeros((count,), jnp.float32).at[jnp.where(experts < 0, count, experts)].set(1.0, mode="drop")
    return partial, jnp.sum(read)


def shared(kind: MoE, weights: dict, layer: jax.Array, normed: jax.Array, ops: Operations) -> jax.Array:
    """This core's partial sum of the shared experts, float32 [B, T, hidden]; zero where there are none."""
    if not kind.shared:
        return jnp.zeros(normed.shape, jnp.float32)
    gate, up = (weights[f"shared_{n}_proj"] for n in ("gate", "up"))
    joined = ops.gated(normed, None, gate, up, layer, eps=kind.eps, activation=kind.activation)
    out = ops.matmul(joined.astype(normed.dtype), weights["shared_down_proj"], layer)
    if kind.shared_gate:
        wide, row = normed.astype(jnp.float32), weights["shared_gate"][layer]
        out = out * jax.nn.sigmoid(jnp.einsum("btd,od->bto", wide, row, precision="highest"))
    return out
