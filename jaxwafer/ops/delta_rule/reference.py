"""Plain JAX: one step for one token, chunks of tokens in parallel for more.

Within a chunk that starts from the state S₀, with G(s, t) the sum of g over the tokens after s up to t, and G(t) over
all up to t, the recurrence unrolls to

    S_t = diag(exp G(t)) S₀ + Σ_{s ≤ t} (exp G(s, t) ⊙ k_s) ⊗ u_s
    u_t = β_t (v_t − (exp G(t) ⊙ k_t)ᵀ S₀ − Σ_{s < t} A_ts u_s),   A_ts = Σ_c k_tc k_sc exp G(s, t)_c
    o_t = (exp G(t) ⊙ q_t)ᵀ S₀ + Σ_{s ≤ t} B_ts u_s,               B_ts = Σ_c q_tc k_sc exp G(s, t)_c

The second line is a unit lower triangular system, (I + diag(β) A) U = diag(β)(V − …): the UT transform of the WY form.
Every exponent is a sum of g's own terms, never a difference of long sums: ≤ 0, and exact however strong the decay.
"""

from functools import partial

import einops
import jax
import jax.numpy as jnp

from jaxwafer.ops.state import State, read_state, write_state

# Tokens that share a triangular system, and those among them that have a decay for every pair; between two such
# sub-chunks a pair's decay is a product, so that A and B are matrix products.
CHUNK, SUB = 64, 16

product = partial(jnp.einsum, precision="highest")


def objection(dtype, platform: str) -> str | None:
    """Why this backend cannot run these inputs: never."""
    return None


def description() -> str:
    return "plain JAX"


def recur(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: State, layer: jax.Array,
          slot: jax.Array, start: jax.Array) -> tuple[jax.Array, State]:  # fmt: skip
    out, rows = delta_rule(q, k, v, g, beta, read_state(state, layer, jnp.maximum(slot, 0), start))
    return out, write_state(state, layer, slot, rows)


def delta_rule(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array,
               state: jax.Array) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """As `api.recur`, from and to states [B, H, K, V] at hand."""
    g = jnp.broadcast_to(g, k.shape)
    if q.shape[1] == 1:
        out, state = step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
        return out[:, None], state
    return chunks(q, k, v, g, beta, state)


def step(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array,
         state: jax.Array) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """One token: q, k, g [B, H, K], v [B, H, V], beta [B, H], state [B, H, K, V] → o [B, H, V], state."""
    state = jnp.exp(g)[..., None] * state
    update = beta[..., None] * (v - product("bhkv,bhk->bhv", state, k))
    state = state + k[..., None] * update[..., None, :]
    return product("bhkv,bhk->bhv", state, q), state


def chunks(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array,
           state: jax.Array) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """T tokens: q, k, g [B, T, H, K], v [B, T, H, V], beta [B, T, H] → o [B, T, H, V], state."""
    tokens = q.shape[1]
    size = min(CHUNK, -(-tokens // SUB) * SUB)

    def split(x: jax.Array) -> jax.Array:
        """[chunks, B, H, sub-chunks, SUB, …]; zeros fill up the last chunk, and zero g and β change nothing."""
        x = jnp.pad(x, ((0, 0), (0, -tokens % size), *((0, 0),) * (x.ndim - 2)))
        return einops.rearrange(x, "b (n i t) h ... -> n b h i t ...", i=size // SUB, t=SUB)

    def next_chunk(state: jax.Array, inputs: tuple) -> tuple[jax.Array, jax.Array]:
        out, state = chunk(*inputs, state)
        return state, out

    state, out = jax.lax.scan(next_chunk, state, tuple(map(split, (q, k, v, g, beta))))
    return einops.rearrange(out, "n b h c v -> b (n c) h v")[:, :tokens], state


def chunk(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array,
          state: jax.Array) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """q, k, g [B, H, I, SUB, K], v [B, H, I, SUB, V], beta [B, H, I, SUB] → o [B, H, I · SUB, V], state."""
    flat = partial(einops.rearrange, pattern="b h i t ... -> b h (i t) ...")
    whole, within, after = product("bhitk->bhik", g), upto(g), beyond(g)
    from_start = within + before(whole)[..., None, :]
    to_end = after + beyond(whole)[..., None, :]
    a, b = scores(k, k, g), scores(q, k, g)
    v, beta = flat(v), flat(beta)[..., None]
    known = product("bhck,bhkv->bhcv", flat(jnp.exp(from_start) * k), state)
    u = product("bhts,bhsv->bhtv", inverse(beta * a), beta * (v - known))
    out = product("bhck,bhkv->bhcv", flat(jnp.exp(from_start) * q), state) + product("bhts,bhsv->bhtv", b, u)
    decay = jnp.exp(product("bhik->bhk", whole))[..., None]
    return out, decay * state + product("bhck,bhcv->bhkv", flat(jnp.exp(to_end) * k), u)


def inverse(lower: jax.Array) -> jax.Array:
    """(I + tril(L, −1))⁻¹ of L [B, H, C, C], by halves: of [[P, 0], [Q, R]] it is [[P⁻¹, 0], [−R⁻¹QP⁻¹, R⁻¹]].

    As exact as substitution, in log₂ C batched products. JAX's own triangular solve is LAPACK's on CPUs: hundreds of
    calls for small systems, each of which wakes the threads of BLAS; it took most of a prefill.
    """
    size = lower.shape[-1]
    padded = 1 << (size - 1).bit_length()
    lower = jnp.pad(lower, ((0, 0), (0, 0), (0, padded - size), (0, padded - size)))
    blocks, width = jnp.ones((*lower.shape[:2], padded, 1, 1), lower.dtype), 1
    while width < padded:
        pairs = einops.rearrange(lower, "b h (i r) (j c) -> b h r c i j", r=2 * width, c=2 * width)
        corner = jnp.einsum("bhrcii->bhirc", pairs[:, :, width:, :width])
        first, second = blocks[:, :, ::2], blocks[:, :, 1::2]
        corner = -product("bhirs,bhist,bhitc->bhirc", second, corner, first)
        top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        blocks = jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return blocks[:, :, 0, :size, :size]


def scores(x: jax.Array, k: jax.Array, g: jax.Array) -> jax.Array:
    """Σ_c x_tc k_sc exp G(s, t)_c for s ≤ t, zero for s > t: x, k, g [B, H, I, SUB, K] → [B, H, I · SUB, I · SUB]."""
    subs, sub = g.shape[2:4]
    # Within a sub-chunk: a pair's decay is over the tokens s < r ≤ t.
    token = jnp.arange(sub)
    s, r, t = token[None, :, None], token[None, None, :], token[:, None, None]
    pair = product("tsr,bhirk->bhitsk", ((s < r) & (r <= t)).astype(g.dtype), g)
    pair = jnp.where((s <= t)[None, None, None], jnp.exp(pair), 0.0)
    near = product("bhitk,bhitsk->bhits", x, k[..., None, :, :] * pair)
    # Between sub-chunks j < i: from the end of s's own over those in between to the start of t's own.
    number = jnp.arange(subs)
    j, m, i = number[None, :, None], number[None, None, :], number[:, None, None]
    between = product("ijm,bhmk->bhijk", ((j < m) & (m < i)).astype(g.dtype), product("bhitk->bhik", g))
    start, end = jnp.exp(upto(g)) * x, jnp.exp(beyond(g)) * k
    far = product("bhitk,bhijsk->bhitjs", start, jnp.exp(between)[..., None, :] * end[:, :, None])
    # Axes (b, h, i, t, j, s).
    earlier, same = (j < i)[None, None, :, None], (j == i)[None, None, :, None]
    both = jnp.where(earlier, far, 0.0) + jnp.where(same, near[..., None, :], 0.0)
    return einops.rearrange(both, "b h i t j s -> b h (i t) (j s)")


def upto(g: jax.Array) -> jax.Array:
    """Sums of g [..., T, K] over the tokens up to each."""
    return product("tr,...rk->...tk", jnp.tri(g.shape[-2], dtype=g.dtype), g)


def before(g: jax.Array) -> jax.Array:
    """Sums of g [..., T, K] over the tokens before each."""
    return product("tr,...rk->...tk", jnp.tri(g.shape[-2], k=-1, dtype=g.dtype), g)


def beyond(g: jax.Array) -> jax.Array:
    """Sums of g [..., T, K] over the tokens after each."""
    return product("rt,...rk->...tk", jnp.tri(g.shape[-2], k=-1, dtype=g.dtype), g)
