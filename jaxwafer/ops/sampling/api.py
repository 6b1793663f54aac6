"""Sampling and log-probabilities over a vocabulary sharded over the mesh: the signatures.

Both run inside `jax.shard_map(..., check_vma=False)`, or outside any mesh with `axes=()`. The full logits are neither
gathered nor sorted, and no control flow depends on data.
"""

import math

import flax.struct
import jax
import jax.numpy as jnp
from jax import lax

from jaxwafer.errors import UserError
from jaxwafer.ops.sampling import reference


@flax.struct.dataclass
class SamplingState:
    """How each of B requests is sampled. Filters apply in this order, as in Hugging Face's `generate`.

    temperature: float32 [B]; 0 (or less) is greedy, and then the rest is not used.
    top_k: int32 [B]; the k most likely tokens and those tied with the k-th. 0 is off.
    top_p: float32 [B]; the fewest most likely tokens whose mass, of what top-k left, is at least p, and those tied with
        the last; never fewer than one. 1 is off.
    min_p: float32 [B]; tokens at least p times as likely as the likeliest. 0 is off; above 1 counts as 1.
    seed: uint32 [B].
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    seed: jax.Array


def sample(
    logits: jax.Array,
    offset: jax.Array | int,
    state: SamplingState,
    position: jax.Array,
    *,
    axes: tuple[str, ...],
    filters: bool,
) -> jax.Array:
    """The next token of each request, int32 [B], the same on every device of `axes`.

    logits: float32 [B, V_local], this shard's rows of the vocabulary; padding rows hold -inf. offset: int32 scalar, the
    token id of the shard's first row. position: int32 [B], where in its sequence the token will stand. axes: the mesh
    axes that the vocabulary is sharded over, () for no mesh. filters: False compiles the greedy program, which reads
    neither `state` nor `position`; True the full one, whose greedy rows give exactly the same tokens.

    Random numbers come from `fold_in(fold_in(key(seed), position), token id)`, and comparisons are exact, so a token
    depends neither on the batch nor on the mesh. Ties go to the lowest id. NaN counts as -inf, +inf as the largest
    finite number, a subnormal as 0; a token at -inf is never chosen, except that a row with no other gives the lowest
    id, 0. Top-p adds probabilities in fixed point, to about 2**-32 a token.

    Raises UserError for a vocabulary of more than 2**20 rows if `filters`: its sums would overflow.
    """
    x = reference.clean(logits)
    ids = jnp.asarray(offset, jnp.int32) + jnp.arange(x.shape[1], dtype=jnp.int32)
    if not filters:
        return reference.winner(x, ids, axes)

    vocabulary = x.shape[1] * math.prod(lax.axis_size(a) for a in axes)
    if vocabulary > reference.MAX_VOCABULARY:
        raise UserError(
            f"a vocabulary of {vocabulary} rows is too large for sampling (at most {reference.MAX_VOCABULARY}); "
            "decode greedily, at temperature 0"
        )
    greedy = ~(state.temperature > 0)
    keep, weight = reference.allowed(
        x,
        temperature=jnp.where(greedy, 1.0, state.temperature),
        top_k=state.top_k,
        top_p=state.top_p,
        min_p=state.min_p,
        axes=axes,
    )
    # Gumbel-max without its logarithms: argmax(log w + Gumbel) = argmax(w / exponential).
    noisy = jnp.where(keep, weight / reference.exponential_noise(state.seed, position, ids), -jnp.inf)
    return reference.winner(jnp.where(greedy[:, None], x, noisy), ids, axes)


def logprob(logits: jax.Array, offset: jax.Array | int, targets: jax.Array, *, axes: tuple[str, ...]) -> jax.Array:
    """log-softmax of each row at its target, float32 [R], the same on every device of `axes`.

    logits: float32 [R, V_local], `offset` and `axes` as in `sample`. targets: int32 [R], token ids; an id outside the
    vocabulary gives -inf. A row with NaN, or with nothing above -inf, gives NaN.
    """
    local = targets - jnp.asarray(offset, jnp.int32)
    mine = (local >= 0) & (local < logits.shape[1])
    at_target = jnp.take_along_axis(logits, jnp.where(mine, local, 0)[:, None], axis=1)[:, 0]
    both = jnp.stack([logits.max(-1), jnp.where(mine, at_target, -jnp.inf)])
    peak, at_target = lax.pmax(both, axes) if axes else both
    total = jnp.exp(logits - peak[:, None]).sum(-1)
    return at_target - peak - jnp.log(lax.psum(total, axes) if axes else total)
