"""Kimi Linear to train on a CPU: flax modules whose parameters are the weights that `model/` declares, by hub name.

The same maths as `layers/` in the forms that suit training: whole sequences from an empty state, latent attention with
keys and values written out, experts by capacity.
"""

import einops
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from jaxwafer.model.attention import MLA
from jaxwafer.model.declare import Weight
from jaxwafer.model.kinds import MLP, Mixer
from jaxwafer.model.linear import KDA
from jaxwafer.model.mlp import DenseMLP, MoE
from jaxwafer.model.spec import Layer, ModelSpec

UNIT_EPS = LATENT_EPS = 1e-6
# Tokens of a chunk of the delta rule. Decays are divided by that of its middle, and e^(8·10) is still a float32: decays
# below e^−10 a token count as that.
CHUNK, LOWEST = 16, -10.0


class KimiLinear(nn.Module):
    """tokens int32 [B, T], 0 for padding at the end → logits float32 [B, T, vocabulary], and of each layer of experts
    the tokens it gave to each, [layers, experts], and the mean square of its router's logits, [layers].

    capacity: rows an expert has room for, as a multiple of the mean; what is beyond is dropped. None: room for all.
    """

    spec: ModelSpec
    capacity: float | None = 1.5

    @nn.compact
    def __call__(self, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        weights = declare(self, self.spec.globals())
        real = tokens != 0
        x = weights["embedding"][tokens]
        loads, sizes = [], []
        for number, layer in enumerate(self.spec.layers):
            x, load, size = Block(layer, self.capacity, name=f"model.layers.{number}")(x, real)
            if isinstance(layer.mlp, MoE):
                loads.append(load)
                sizes.append(size)
        head = weights.get("head", weights["embedding"])
        logits = norm(x, weights["final_norm"], self.spec.eps) @ head.T
        return logits, jnp.stack(loads), jnp.stack(sizes)


class Block(nn.Module):
    """A layer: x [B, T, hidden] → x, the load of its experts and the size of its router's logits (zeros without)."""

    layer: Layer
    capacity: float | None

    @nn.compact
    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        mixer, mlp = self.layer.mixer, self.layer.mlp
        w = declare(self, mixer.weights())
        x = x + MIXERS[type(mixer)](mixer, w, norm(x, w["norm"], mixer.eps))
        w = declare(self, mlp.weights())
        normed = norm(x, w["norm"], mlp.eps)
        if isinstance(mlp, DenseMLP):
            return x + dense(normed, w["gate"], w["up"], w["down"]), jnp.zeros(()), jnp.zeros(())
        flat = einops.rearrange(normed, "b t d -> (b t) d")
        out, load, size = mixture(mlp, w, flat, einops.rearrange(real, "b t -> (b t)"), self.capacity)
        return x + out.reshape(x.shape), load, size


def declare(module: nn.Module, weights: tuple[Weight, ...]) -> dict[str, jax.Array]:
    """Parameters of declared weights, {name: array}; weights that are parts of one tensor share its parameter."""
    found, made = {}, {}
    for weight in weights:
        if weight.hub not in made:
            shape = weight.shape if weight.per_expert else weight.hub_shape
            made[weight.hub] = module.param(weight.hub, initializer(weight), shape)
        array = made[weight.hub]
        if weight.axes[0].within:
            array = array[weight.axes[0].hub_index()]
        found[weight.name] = array
    return found


def initializer(weight: Weight):
    """Normal with 1/√inputs, less for what adds to the residual stream; decays from 1/1000 to 1/3 a token; convolutions
    that pass a query's own token, and for every channel of a key or value one of the four."""

    def normal(key, shape, dtype=jnp.float32):
        scale = {"o": 0.25, "down": 0.25, "shared_down_proj": 0.25, "head": 0.5}.get(weight.name, 1.0)
        return scale * shape[-1] ** -0.5 * jax.random.normal(key, shape, dtype)

    def rates(key, shape, dtype=jnp.float32):
        return jax.random.uniform(key, shape, dtype, jnp.log(0.5), jnp.log(4.0))

    def last_token(key, shape, dtype=jnp.float32):
        return jax.nn.one_hot(shape[-1] - 1, shape[-1]) + 0.1 * jax.random.normal(key, shape, dtype)

    def any_token(key, shape, dtype=jnp.float32):
        tap = jax.random.randint(key, shape[:-1], 0, shape[-1])
        return jax.nn.one_hot(tap, shape[-1]) + 0.1 * jax.random.normal(key, shape, dtype)

    def steps(key, shape, dtype=jnp.float32):
        step = jnp.exp(jax.random.uniform(key, shape, dtype, jnp.log(1e-3), jnp.log(0.1)))
        return step + jnp.log(-jnp.expm1(-step))

    if weight.name.endswith("conv"):
        return last_token if weight.name == "q_conv" else any_token
    if weight.name == "embedding":
        return nn.initializers.normal(0.5)
    if weight.matrix or weight.name == "router":
        return normal
    special = {"a_log": rates, "dt_bias": steps, "router_bias": nn.initializers.zeros}
    return special.get(weight.name, nn.initializers.ones)


def norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + eps) * weight


def dense(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down.T


def kda(kind: KDA, w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Kimi Delta Attention (arXiv 2510.26692) of normed x [B, T, hidden]."""
    inputs = x @ jnp.concatenate([w[n] for n in ("q", "k", "v", "f_a", "g_a", "b")]).T
    channels, keys = kind.heads * (2 * kind.key_dim + kind.value_dim), kind.heads * kind.key_dim
    taps = jnp.concatenate([w[f"{n}_conv"] for n in "qkv"])[:, 0]
    heads = jax.nn.silu(convolve(inputs[..., :channels], taps))
    f, g, b = jnp.split(inputs[..., channels:], (kind.decay_rank, kind.decay_rank + kind.gate_rank), axis=-1)
    q, k, v = (
        einops.rearrange(a, "b t (h d) -> b h t d", h=kind.heads) for a in jnp.split(heads, (keys, 2 * keys), -1)
    )
    z = einops.rearrange(f @ w["f_b"].T + w["dt_bias"], "b t (h d) -> b h t d", h=kind.heads)
    decay = -jnp.exp(w["a_log"][0, 0])[:, :, None] * jax.nn.softplus(z)
    beta = einops.rearrange(jax.nn.sigmoid(b), "b t h -> b h t 1")
    out = delta_rule(unit(q) * kind.key_dim**-0.5, unit(k), v, decay, beta)
    out = einops.rearrange(norm(out, w["o_norm"], kind.eps), "b h t d -> b t (h d)")
    return (out * jax.nn.sigmoid(g @ w["g"].T)) @ w["o"].T


def convolve(x: jax.Array, taps: jax.Array) -> jax.Array:
    """Causal depthwise convolution of x [B, T, C] with taps [C, W], the last for the token itself."""
    width = taps.shape[1]
    padded = jnp.pad(x, ((0, 0), (width - 1, 0), (0, 0)))
    return sum(padded[:, n : n + x.shape[1]] * taps[:, n] for n in range(width))


def unit(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + UNIT_EPS)


def delta_rule(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array) -> jax.Array:
    """o [B, H, T, V] of q, k, g [B, H, T, K], v [B, H, T, V], beta [B, H, T, 1] from an empty state: the recurrence of
    `ops/delta_rule/api.py` in chunks.

    With G the decays summed within a chunk, u = A⁻¹(βv − β(e^G k)S) where A = I + tril(β (e^G k)(e^−G k)ᵀ, −1): all but
    S is known of all chunks at once, and a scan over chunks carries S.
    """
    heads, tokens = q.shape[:2], q.shape[2]
    padded = -(-tokens // CHUNK) * CHUNK

    def split(a: jax.Array) -> jax.Array:
        a = jnp.pad(a, ((0, 0), (0, 0), (0, padded - tokens), (0, 0)))
        return einops.rearrange(a, "b h (n c) d -> (n b h) c d", c=CHUNK)

    def stack(a: jax.Array) -> jax.Array:
        return einops.rearrange(a, "(n x) c d -> n x c d", n=padded // CHUNK)

    q, k, v, g, beta = map(split, (q, k, v, g, beta))
    lower = np.tri(CHUNK, dtype=bool)
    total = jnp.einsum("ts,nsk->ntk", lower.astype(np.float32), jnp.maximum(g, LOWEST))
    last, middle = total[:, -1:], total[:, CHUNK // 2 - 1 : CHUNK // 2]
    up, grown = jnp.exp(total - middle), jnp.exp(total)
    left = jnp.concatenate([beta * k * up, q * up], axis=1)
    both = jnp.einsum("ntk,nsk->nts", left, k * jnp.exp(middle - total))
    # Of pairs that do not count the products may overflow.
    inverse = invert(jnp.where(np.tri(CHUNK, k=-1, dtype=bool), both[:, :CHUNK], 0.0))
    b = jnp.where(lower, both[:, CHUNK:], 0.0)
    known = jnp.einsum("nts,nsd->ntd", inverse, jnp.concatenate([beta * v, beta * k * grown], axis=-1))
    own, through = jnp.split(known, (v.shape[-1],), axis=-1)

    def step(state: jax.Array, chunk: tuple) -> tuple[jax.Array, jax.Array]:
        own, through, q, b, k, last = chunk
        u = own - jnp.einsum("xtk,xkv->xtv", through, state)
        out = jnp.einsum("xtk,xkv->xtv", q, state) + jnp.einsum("xts,xsv->xtv", b, u)
        return jnp.swapaxes(last, 1, 2) * state + jnp.einsum("xtk,xtv->xkv", k, u), out

    state = jnp.zeros((heads[0] * heads[1], k.shape[-1], v.shape[-1]))
    inputs = tuple(map(stack, (own, through, q * grown, b, k * jnp.exp(last - total), jnp.exp(last))))
    out = jax.lax.scan(step, state, inputs, unroll=4)[1]
    return einops.rearrange(out, "n (b h) c v -> b h (n c) v", b=heads[0])[:, :, :tokens]


@jax.custom_vjp
def invert(lower: jax.Array) -> jax.Array:
    """(I + L)⁻¹ of strictly lower triangular L [N, 16, 16]: (I − L)(I + L²)(I + L⁴)(I + L⁸), as L¹⁶ = 0."""
    eye = jnp.eye(CHUNK)
    out, power = eye - lower, lower
    for _ in range(3):
        power = power @ power
        out = out @ (eye + power)
    return out


def _invert(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    out = invert(lower)
    return out, out


def _invert_back(out: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    turned = jnp.swapaxes(out, 1, 2)
    return (-(turned @ grad @ turned),)


invert.defvjp(_invert, _invert_back)


def mla(kind: MLA, w: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """Multi-head latent attention without position embedding, keys and values written out."""
    q = einops.rearrange(x @ w["q"].T, "b t (h d) -> b h t d", h=kind.heads)
    latent, shared = jnp.split(x @ w["kv_a"].T, (kind.rank,), axis=-1)
    latent = norm(latent, w["kv_a_norm"], LATENT_EPS)
    k, v = (einops.rearrange(latent @ w[n].T, "b t (h d) -> b h t d", h=kind.heads) for n in ("k_b", "v_b"))
    shared = jnp.broadcast_to(shared[:, None], (*k.shape[:3], kind.rope_dims))
    scores = jnp.einsum("bhtd,bhsd->bhts", q, jnp.concatenate([k, shared], axis=-1)) * kind.scale
    scores = jnp.where(np.tri(x.shape[1], dtype=bool), scores, -1e30)
    out = jnp.einsum("bhts,bhsd->bhtd", jax.nn.softmax(scores), v)
    return einops.rearrange(out, "b h t d -> b t (h d)") @ w["o"].T


def mixture(kind: MoE, w: dict[str, jax.Array], x: jax.Array, real: jax.Array,
            capacity: float | None) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Experts of x [N, hidden]: their weighted sum with the shared ones, tokens to each [experts], mean square of the
    logits. Rows are gathered by expert, [experts, room, hidden], and those beyond an expert's room dropped."""
    count, chosen = kind.experts, kind.router.chosen
    logits = x @ w["router"].T
    scores = jax.nn.sigmoid(logits)
    room = len(x) if capacity is None else int(capacity * len(x) * chosen / count)
    picked, biased = [], jax.lax.stop_gradient(scores) + w["router_bias"]
    for _ in range(chosen):
        picked.append(jnp.argmax(biased, axis=-1))
        biased = jnp.where(jax.nn.one_hot(picked[-1], count, dtype=bool), -jnp.inf, biased)
    picked = jnp.stack(picked, axis=1)
    shares = jnp.take_along_axis(scores, picked, axis=1)
    shares = shares / (jnp.sum(shares, axis=-1, keepdims=True) + 1e-20) * kind.router.scale
    sent = jax.nn.one_hot(picked.reshape(-1), count, dtype=jnp.float32) * jnp.repeat(real, chosen)[:, None]
    place = jnp.sum(jnp.cumsum(sent, axis=0) * sent, axis=-1).astype(jnp.int32) - 1
    kept = (place >= 0) & (place < room)
    slot = jnp.where(kept, picked.reshape(-1) * room + place, count * room)
    source = jnp.full(count * room, len(slot)).at[slot].set(jnp.arange(len(slot)), mode="drop")
    given = gather_rows(x, source // chosen, slot.reshape(-1, chosen))
    given = given.reshape(count, room, -1)
    gate, up = (jnp.einsum("end,emd->enm", given, w[n]) for n in ("gate", "up"))
    out = jnp.einsum("enm,edm->end", jax.nn.silu(gate) * up, w["down"]).reshape(count * room, -1)
    each = gather_rows(out, slot, source[:, None]).reshape(len(x), chosen, -1)
    mixed = jnp.sum(each * shares[..., None], axis=1)
    if kind.shared:
        mixed = mixed + dense(x, w["shared_gate_proj"], w["shared_up_proj"], w["shared_down_proj"])
    return mixed, jnp.sum(sent, axis=0), jnp.mean(jnp.square(logits))


@jax.custom_vjp
def gather_rows(x: jax.Array, index: jax.Array, readers: jax.Array) -> jax.Array:
    """x[index], zero where the index is len(x). readers [len(x), R]: which rows of the result read each row of x,
    len(index) where none; so that the gradient is a gather too and not a scatter."""
    return jnp.concatenate([x, jnp.zeros_like(x[:1])])[index]


def _gather_rows(x, index, readers):
    return gather_rows(x, index, readers), readers


def _gather_rows_back(readers, grad):
    return jnp.sum(jnp.concatenate([grad, jnp.zeros_like(grad[:1])])[readers], axis=1), None, None


gather_rows.defvjp(_gather_rows, _gather_rows_back)

MIXERS: dict[type[Mixer] | type[MLP], object] = {KDA: kda, MLA: mla}
