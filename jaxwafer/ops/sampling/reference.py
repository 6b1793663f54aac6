"""Sampling in plain JAX: which tokens the filters keep, the noise, and the winner, over a sharded vocabulary.

Whatever decides between tokens is either exact (max, integer sums) or computed token by token, so that the result does
not depend on how many shards the vocabulary lies on.
"""

import jax
import jax.numpy as jnp
from jax import lax

# Fixed-point sums below stay under 2**32 up to this many rows.
MAX_VOCABULARY = 1 << 20
DIGIT = 8
LAST = jnp.iinfo(jnp.int32).max


def clean(logits: jax.Array) -> jax.Array:
    """Logits float32 [B, V] with NaN as -inf, +inf as the largest finite number, and -0 and subnormals as 0."""
    x = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    x = jnp.minimum(x, jnp.finfo(jnp.float32).max)
    # Whether subnormals equal 0 differs between backends, and keys are compared as bits.
    return jnp.where(jnp.abs(x) < jnp.finfo(jnp.float32).tiny, 0.0, x)


def winner(score: jax.Array, ids: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The id of the highest score, the lowest one of ties; int32 [B]. score: float32 [B, V], no NaN. ids: int32 [V]."""
    ids = jnp.broadcast_to(ids[None], score.shape)
    top, best = _highest(score, ids)
    if axes:
        # Value and id travel together: one collective, of 8 bytes a row and shard.
        pair = jnp.stack([lax.bitcast_convert_type(top, jnp.int32), best])
        pair = lax.all_gather(pair, axes, axis=2)
        _, best = _highest(lax.bitcast_convert_type(pair[0], jnp.float32), pair[1])
    return best


def allowed(
    x: jax.Array,
    *,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    min_p: jax.Array,
    axes: tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """The tokens that may be sampled, bool [B, V], and every token's probability relative to the highest, float32.

    x: `clean` logits float32 [B, V], this shard's part. temperature: float32 [B], > 0. top_k, top_p, min_p: [B], as in
    `api.SamplingState`.
    """
    key, real = _monotone(x), x > -jnp.inf
    peak = _over(lax.pmax, x.max(-1), axes)
    # Subtracting the peak first keeps a low temperature from overflowing.
    scaled = (x - jnp.where(peak > -jnp.inf, peak, 0.0)[:, None]) / temperature[:, None]
    weight = jnp.where(real, jnp.exp(scaled), 0.0)

    k = jnp.maximum(top_k, 0).astype(jnp.uint32)
    kth = threshold(key, real.astype(jnp.uint32), k, axes)
    keep = real & (key >= jnp.where(top_k > 0, kth, 0)[:, None])

    mass = _fixed_point(jnp.where(keep, weight, 0.0), axes)
    total = _over(lax.psum, mass.sum(-1, dtype=jnp.uint32), axes)
    wanted = jnp.ceil(jnp.clip(top_p, 0.0, 1.0) * total.astype(jnp.float32)).astype(jnp.uint32)
    edge = threshold(key, mass, jnp.clip(wanted, 1, jnp.maximum(total, 1)), axes)
    keep &= key >= jnp.where(top_p < 1, edge, 0)[:, None]

    # min-p compares with the highest probability, which every filter above has kept.
    return keep & (weight >= jnp.minimum(min_p, 1.0)[:, None]), weight


def threshold(key: jax.Array, amount: jax.Array, target: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The highest key t, uint32 [B], such that tokens with key >= t together have `target` or more; 0 if none has.

    key, amount: uint32 [B, V], this shard's part. target: uint32 [B], at least 1. The amounts of a row sum to less than
    2**32 over the whole vocabulary; the amount of each is 1 for top-k, its probability in fixed point for top-p.

    Radix selection: a histogram of the highest 8 bits, summed over the mesh, says which bin holds the threshold; the
    next 8 bits are looked at only among the tokens of that bin, and so on, four times. Nothing is sorted, and the mesh
    carries 1 KiB a row and round whatever the vocabulary. The idea is the radix top-k of GPUs (for instance RadiK,
    arXiv:2501.14336); summing the histograms over a mesh, and masses in place of counts, change nothing in it.
    """
    rows = key.shape[0]
    row = jnp.arange(rows, dtype=jnp.int32)[:, None] << DIGIT
    bins = jnp.arange(1 << DIGIT, dtype=jnp.int32)[None]
    prefix = jnp.zeros(rows, jnp.uint32)
    for shift in range(32 - DIGIT, -1, -DIGIT):
        digits = key >> shift
        # Two shifts, as one by 32 is undefined.
        live = jnp.where(digits >> DIGIT == prefix[:, None], amount, 0)
        index = row + (digits & (1 << DIGIT) - 1).astype(jnp.int32)
        histogram = jnp.zeros(rows << DIGIT, jnp.uint32).at[index].add(live, mode="promise_in_bounds")
        histogram = _over(lax.psum, histogram.reshape(rows, -1), axes)
        # Of this bin and all above it; it falls along the bins, so counting finds the last that reaches the target.
        reached = lax.cumsum(histogram, axis=1, reverse=True)
        chosen = jnp.maximum((reached >= target[:, None]).sum(-1, dtype=jnp.int32) - 1, 0)
        above = jnp.where(bins == chosen[:, None], reached - histogram, 0).sum(-1, dtype=jnp.uint32)
        target = target - above
        prefix = prefix << DIGIT | chosen.astype(jnp.uint32)
    return prefix


def exponential_noise(seed: jax.Array, position: jax.Array, ids: jax.Array) -> jax.Array:
    """Exponentially distributed numbers, float32 [B, V], each a function of its seed, position and token id alone.

    seed: uint32 [B]. position: int32 [B]. ids: int32 [V]. A folded key is itself 64 random bits (one block of the
    counter-based generator), so nothing more is drawn from it.
    """
    stream = jax.vmap(lambda s, p: jax.random.fold_in(jax.random.key(s, impl="threefry2x32"), p))(seed, position)
    keys = jax.vmap(jax.vmap(jax.random.fold_in, (None, 0)), (0, None))(stream, ids)
    bits = jax.random.key_data(keys)
    # Small numbers win, so precision is wanted near 0: 64 bits keep the mantissa full down to 2**-40.
    uniform = bits[..., 0].astype(jnp.float32) * 2.0**-32 + bits[..., 1].astype(jnp.float32) * 2.0**-64
    return -jnp.log1p(-jnp.clip(uniform, 2.0**-64, 1 - 2.0**-24))


def _highest(score: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    top = score.max(-1)
    return top, jnp.where(score == top[:, None], ids, LAST).min(-1)


def _monotone(x: jax.Array) -> jax.Array:
    """uint32 keys in the order of the floats: positive ones get the sign bit, negative ones have all bits inverted."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _fixed_point(weight: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Weights in [0, 1], the highest of a row 1, as uint32 that sum to about 2**31 a row: the same on every mesh."""
    # A float sum would depend on the mesh; this one is of integers, in halves of 12 bits.
    fine = jnp.round(weight * 2.0**24).astype(jnp.uint32)
    halves = jnp.stack([(fine >> 12).sum(-1, dtype=jnp.uint32), (fine & 0xFFF).sum(-1, dtype=jnp.uint32)])
    high, low = _over(lax.psum, halves, axes).astype(jnp.float32)
    total = jnp.maximum(high * 2.0**-12 + low * 2.0**-24, 1.0)
    return jnp.round(weight * (2.0**31 / total)[:, None]).astype(jnp.uint32)


def _over(reduce, value: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return reduce(value, axes) if axes else value
