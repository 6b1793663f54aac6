"""What each layer of a model needs: the planner's view of a ModelSpec.

Bytes here are the maths': matrices in their formats, vectors in the checkpoint's own type, one copy of each head, KV
rows without exponents, from the same declarations that load and decode. What the engine stores beyond that is in
`partition.stored`.
"""

from dataclasses import dataclass, replace

from jaxwafer.model.kinds import MoE
from jaxwafer.model.spec import ModelSpec
from jaxwafer.partition.placement import Formats, Stack, place
from jaxwafer.partition.plan import uniform
from jaxwafer.quant.fields import check_kv_format, needed_state_bytes, needed_token_bytes
from jaxwafer.quant.formats import FORMATS
from jaxwafer.quant.storage import Storage

# Residual streams and the past inputs of convolutions are bfloat16.
ACTIVATION_BYTES = 2


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One layer. Bytes, FLOPs and matrix elements.

    kind: such as "KDA + MoE". weights, of them expert_weights; token: KV a token, window: of how many tokens at most
    (None: all); state: a request. experts, chosen: of a mixture, else 0. active: matrix elements that a token goes
    through. flops_fixed, flops_context: of a token's mixer beside them, and for each token of context.
    """

    kind: str
    weights: int
    token: int = 0
    window: int | None = None
    state: int = 0
    expert_weights: int = 0
    experts: int = 0
    chosen: int = 0
    active: float = 0.0
    flops_fixed: float = 0.0
    flops_context: float = 0.0

    def seen(self, context: float) -> float:
        """Tokens of `context` that the layer keeps."""
        return min(context, self.window or context)

    def request(self, context: int) -> int:
        """Bytes of KV and state that a request of `context` tokens keeps."""
        return self.token * self.seen(context) + self.state

    def touched(self, requests: float) -> float:
        """Weight bytes read for `requests` tokens: of E experts with k chosen E·(1 − (1 − k/E)^m) are expected."""
        share = 1.0 - (1.0 - self.chosen / self.experts) ** requests if self.experts else 1.0
        return self.weights - self.expert_weights * (1.0 - share)

    def bytes(self, requests: float, context: float) -> float:
        """Bytes that a step of `requests` tokens moves; state is read and written."""
        return self.touched(requests) + requests * (self.token * self.seen(context) + 2 * self.state)

    def flops(self, requests: float, context: float) -> float:
        return requests * (2.0 * self.active + self.flops_fixed + self.flops_context * self.seen(context))


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model as the planner sees it.

    embedding, head: bytes; a tied head has none of its own. head_read: bytes that a step reads for its logits.
    head_active: matrix elements of the head. block_every: layers between finished residual blocks that hop too, else
    None. spec, formats: of a real model, None for one made up.
    """

    name: str
    layers: tuple[Layer, ...]
    hidden: int
    embedding: int = 0
    head: int = 0
    head_read: int = 0
    head_active: float = 0.0
    block_every: int | None = None
    max_context: int | None = None
    kv_cache: str = "bf16"
    parameters: int = 0
    active_parameters: int = 0
    spec: ModelSpec | None = None
    formats: Formats | None = None

    @property
    def weights(self) -> int:
        """Bytes of all weights."""
        return sum(layer.weights for layer in self.layers) + self.vocabulary

    @property
    def vocabulary(self) -> int:
        return self.embedding + self.head

    def stream_bytes(self, layer: int) -> int:
        """Bytes of one token's residual stream after a layer."""
        blocks = layer // self.block_every + 1 if self.block_every else 0
        return (1 + blocks) * self.hidden * ACTIVATION_BYTES


def model_needs(name: str, spec: ModelSpec, formats: Formats, *, kv_cache: str) -> Model:
    """The planner's view of a spec in `formats`."""
    check_kv_format(kv_cache)
    whole = place(spec, uniform(len(spec.layers), 1), formats, cores=1)
    parts: dict[int, list[Stack]] = {n: [] for n in range(len(spec.layers))}
    for stack in whole.stacks:
        for number in stack.layers[0]:
            parts[number].append(stack)
    made: dict[tuple[int, ...], Layer] = {}

    def layer(number: int) -> Layer:
        key = tuple(map(id, parts[number]))
        if key not in made:
            made[key] = _layer(parts[number], spec.native, kv_cache)
        return made[key]

    tables = {n: _needed(s, spec.native) for n, s in whole.globals.items()}
    table = whole.globals.get("head", whole.globals["embedding"])
    return Model(
        name=name,
        layers=tuple(map(layer, range(len(spec.layers)))),
        hidden=spec.hidden,
        embedding=tables["embedding"],
        head=sum(nbytes for n, nbytes in tables.items() if n != "embedding"),
        head_read=_needed(table, spec.native),
        head_active=float(table.weight.size),
        block_every=spec.residual.every if spec.residual else None,
        max_context=spec.max_context,
        kv_cache=kv_cache,
        parameters=spec.parameters,
        active_parameters=spec.active_parameters,
        spec=spec,
        formats=formats,
    )


def _layer(stacks: list[Stack], native: str, kv_cache: str) -> Layer:
    mixer, mlp = stacks[0].kind, stacks[1].kind
    storages = [s for stack in stacks for s in stack.weights.values()]
    moe = mlp if isinstance(mlp, MoE) else None
    chosen = moe.router.chosen / moe.experts if moe else 1.0
    # FLOPs are linear in the tokens seen.
    fixed = mixer.flops(0.0)
    return Layer(
        kind=f"{type(mixer).__name__} + {type(mlp).__name__}",
        weights=sum(_needed(s, native) for s in storages),
        token=needed_token_bytes(mixer.cache(), kv_cache),
        window=getattr(mixer, "window", None),
        state=needed_state_bytes(mixer.cache(), ACTIVATION_BYTES),
        expert_weights=sum(_needed(s, native) for s in storages if s.weight.of_experts),
        experts=moe.experts if moe else 0,
        chosen=moe.router.chosen if moe else 0,
        active=sum(s.weight.size * (chosen if s.weight.of_experts else 1.0) for s in storages if s.weight.matrix),
        flops_fixed=fixed,
        flops_context=mixer.flops(1.0) - fixed,
    )


def _needed(storage: Storage, native: str) -> int:
    """Bytes of a weight on one device, vectors as the checkpoint has them."""
    if storage.weight.matrix:
        return storage.wafer_bytes(1, 1)
    return storage.weight.size * FORMATS[native].numpy.itemsize


def merged(model: Model, vocabulary: str) -> tuple[Layer, ...]:
    """The layers, with embedding and head counted to the first and the last for the vocabulary at the ends."""
    if vocabulary != "ends":
        return model.layers
    first, last = model.layers[0], len(model.layers) - 1
    layers = [replace(first, weights=first.weights + model.embedding), *model.layers[1:]]
    layers[last] = replace(layers[last], weights=layers[last].weights + model.head)
    return tuple(layers)
