"""The gated delta rule, the recurrence of KDA and Gated DeltaNet: the signature, and the backends."""

import jax
import jax.numpy as jnp

from jaxwafer.ops import choice
from jaxwafer.ops.delta_rule import reference, tpu
from jaxwafer.ops.state import State

# Tried in order. Each module has `objection(dtype, platform) -> str | None`, `description() -> str` and `recur`. The
# reference objects to nothing.
BACKENDS = {"tpu": tpu, "reference": reference}


def recur(q: jax.Array, k: jax.Array, v: jax.Array, g: jax.Array, beta: jax.Array, state: State, layer: jax.Array,
          slot: jax.Array, start: jax.Array, *, backend: str) -> tuple[jax.Array, State]:  # fmt: skip
    """o [B, T, H, V] of T tokens of each request, and the state with theirs after them; all float32.

    For each token and head, with S the state as a matrix [K, V] (Kimi Linear, arXiv 2510.26692, eq. 1):

        S ← diag(exp g) S;  S ← S + k ⊗ β(v − Sᵀk);  o = Sᵀq

    q, k: [B, T, H, K]. v: [B, T, H, V]. g: log decay ≤ 0, a channel [B, T, H, K] (KDA) or a head [B, T, H, 1] (Gated
    DeltaNet). beta: [B, T, H]. A token with g = 0 and β = 0 leaves the state exactly as it is, if its k and v are
    finite. T = 1 takes one step; more tokens are taken in chunks, with the same result to rounding. state: [layers,
    rows, H, K, V]. slot, start: int32 [B], each request's row, and the position of its first token: at 0 its state
    counts as zero. A negative slot reads and writes nothing; its o means nothing.
    """
    return BACKENDS[backend].recur(q, k, v, g, beta, state, layer, slot, start)


def choose(platform: str) -> str:
    """The backend on a platform: the first that does not object."""
    return choice.first(BACKENDS, jnp.float32, platform)[0]


def implementation(platform: str) -> dict[str, str]:
    """{"backend", "reason"} on a platform."""
    return dict(zip(("backend", "reason"), choice.first(BACKENDS, jnp.float32, platform), strict=True))
