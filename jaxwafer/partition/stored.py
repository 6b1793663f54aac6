"""What the engine allocates for a partition, beside what the maths needs.

Its stacks are equally deep on every wafer, its vocabulary lies on all, vectors are float32, heads are padded and
copied, FP8 rows carry exponents, and a request keeps whole blocks of its whole context. The bytes are the placement's,
which loads and decodes.
"""

from dataclasses import dataclass

from jaxwafer.partition.needs import ACTIVATION_BYTES, Model
from jaxwafer.partition.placement import place
from jaxwafer.partition.plan import Partition
from jaxwafer.quant.fields import state_bytes, token_bytes

# Tokens of a KV block, as `engine.Options` has them.
BLOCK = 32


@dataclass(frozen=True, kw_only=True)
class Stored:
    """Bytes on every wafer. weights: allocated. weights_own: of each wafer's own layers and vocabulary, without what is
    there because another wafer has more. token, state: of a token and of a request. requests: that the engine admits at
    the context, 0 where not even the weights fit. padding: of stacks that are not full on all wafers, of all wafers.
    """

    weights: int
    weights_own: tuple[int, ...]
    token: int
    state: int
    requests: int
    padding: int


def stored(model: Model, partition: Partition, *, cores: int, memory: int, context: int,
           streamed: bool = False) -> Stored:  # fmt: skip
    """What the engine allocates on wafers of `cores` devices that hold `memory` bytes each wafer. streamed: stacks are
    outside of it, and two slots of layers in it."""
    placed = place(model.spec, partition, model.formats, cores=cores)
    wafers = placed.wafers
    token = sum(s.depth * token_bytes(s.kind.cache(), model.kv_cache, wafers, cores) for s in placed.mixers)
    state = sum(s.depth * state_bytes(s.kind.cache(), ACTIVATION_BYTES, wafers, cores) for s in placed.mixers)
    own = tuple(placed.weight_bytes(w) for w in range(wafers))
    request = token * -(-context // BLOCK) * BLOCK + state
    weights = placed.global_bytes + 2 * max(placed.slot_bytes) if streamed else placed.allocated_bytes
    left = memory - weights
    return Stored(
        weights=weights,
        weights_own=own,
        token=token,
        state=state,
        requests=max(0, left // request),
        padding=wafers * placed.allocated_bytes - sum(own),
    )
