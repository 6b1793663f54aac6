"""The compiled programs of one engine: one decode and a few prefill shapes, each compiled once and counted.

The first program is compiled with automatic layouts for weights and caches; they are then allocated in the formats it
asks for, and every later program takes them as they are.
"""

import time
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxwafer.cache.kv import CacheShape
from jaxwafer.ops.sampling.api import SamplingState
from jaxwafer.partition import tree
from jaxwafer.pipeline.decode import Flight, Requests, Slots, decode
from jaxwafer.pipeline.prefill import Chunks, prefill
from jaxwafer.pipeline.stream import HOST
from jaxwafer.pipeline.tick import Pipeline

WAFER, EVERYWHERE = PartitionSpec("wafer"), PartitionSpec()


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The static sizes that programs are compiled for.

    micro_batches, batch: M micro-batches of B requests. blocks: KV blocks a request may own. burst: most rounds in one
    decode call. chunks: most chunks in one prefill call. chunk_tokens: chunk lengths, ascending. eos: number of
    end-of-sequence ids.
    """

    micro_batches: int
    batch: int
    blocks: int
    burst: int
    chunks: int
    chunk_tokens: tuple[int, ...]
    eos: int


class Programs:
    """Compiles on first use. `compiles` and `seconds` count; `temp_bytes`: the largest temporary of decoding."""

    def __init__(self, pipeline: Pipeline, cache: CacheShape, mesh: Mesh, sizes: Sizes):
        self.pipeline, self.cache, self.mesh, self.sizes = pipeline, cache, mesh, sizes
        self.compiles, self.seconds, self.temp_bytes = 0, 0.0, 0
        self._compiled: dict[tuple, object] = {}
        self.period = max(sizes.micro_batches, pipeline.schedule.rounds)
        self.abstract_weights = tree.abstract(pipeline.placement)
        self._weight_specs = tree.specs(pipeline.placement)
        self.abstract_cache = cache.abstract()
        self._cache_specs = cache.specs()
        self.weight_formats = jax.tree.map(self._automatic, self._weight_specs)
        if pipeline.streamed:
            # XLA chooses no layouts in host memory.
            for group in ("mixers", "mlps", "residuals"):
                self.weight_formats[group] = jax.tree.map(self._on_host, self._weight_specs[group])
        self.cache_formats = jax.tree.map(self._automatic, self._cache_specs)

    @cached_property
    def tables(self):
        """What wafers must know, on them."""
        return self.put(self.pipeline.tables(), WAFER)

    def put(self, host, spec: PartitionSpec = EVERYWHERE):
        """A host tree on the mesh, by default the same on every device. Every process has all of it."""
        sharding = NamedSharding(self.mesh, spec)
        if sharding.is_fully_addressable:
            return jax.device_put(host, sharding)
        # device_put would ask the other processes whether theirs is the same.
        return jax.tree.map(
            lambda a: jax.make_array_from_callback(np.shape(a), sharding, np.asarray(a).__getitem__), host
        )

    def decode(self, *, filters: bool):
        """Compiled `decode`: (weights, tables, cache, requests, slots, flight, begin, number)."""
        return self._get(("decode", filters, False))

    def unrolled(self):
        """`decode` without a loop over layers: XLA's counts of its one loop's body are those of a round of ticks."""
        return self._get(("decode", False, True))

    def prefill(self, length: int, *, filters: bool):
        """Compiled `prefill` of chunks of `length` tokens: (weights, tables, cache, chunks, number)."""
        return self._get(("prefill", length, filters, False))

    def score(self, length: int):
        """As `prefill`, for chunks with targets."""
        return self._get(("prefill", length, False, True))

    def idle_requests(self) -> Requests:
        shape = (self.sizes.micro_batches, self.sizes.batch)
        zeros = np.zeros(shape, np.int32)
        return Requests(token=zeros, position=zeros, remaining=zeros, ends=np.ones(shape, bool))

    def idle_flight(self) -> Flight:
        return self.put(jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), self._flight()), WAFER)

    def _flight(self) -> Flight:
        schedule, batch = self.pipeline.schedule, self.sizes.batch
        front = (schedule.wafers, schedule.period)
        stream = jax.eval_shape(lambda: self.pipeline.blank(batch, 1))
        boxes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((*front, *leaf.shape), leaf.dtype), stream)
        count = jax.ShapeDtypeStruct((*front, batch), jnp.int32)
        return Flight(stream=boxes, start=count, count=count)

    def _slots(self) -> Slots:
        shape = (self.sizes.micro_batches, self.sizes.batch)
        return Slots(
            table=jax.ShapeDtypeStruct((*shape, self.sizes.blocks), jnp.int32),
            sampling=_sampling(shape),
            eos=jax.ShapeDtypeStruct((self.sizes.eos,), jnp.int32),
            fresh=jax.ShapeDtypeStruct(shape, jnp.bool_),
        )

    def _chunks(self, length: int, score: bool) -> Chunks:
        number = self.sizes.chunks
        tokens, each = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((number, length), (number,)))
        table = jax.ShapeDtypeStruct((number, self.sizes.blocks), jnp.int32)
        return Chunks(tokens=tokens, targets=tokens if score else None, start=each, count=each, table=table, slot=each,
                      sampling=_sampling((number,)))  # fmt: skip

    def _automatic(self, spec: PartitionSpec) -> Format:
        return Format(Layout.AUTO, NamedSharding(self.mesh, spec))

    def _on_host(self, spec: PartitionSpec) -> NamedSharding:
        return NamedSharding(self.mesh, spec, memory_kind=HOST)

    def _get(self, key: tuple):
        if key not in self._compiled:
            begin = time.perf_counter()
            self._compiled[key] = self._decode(*key[1:]) if key[0] == "decode" else self._prefill(*key[1:])
            self.seconds += time.perf_counter() - begin
            self.compiles += 1
        return self._compiled[key]

    def _decode(self, filters: bool, unroll: bool):
        sizes = self.sizes
        gated = sizes.micro_batches < self.pipeline.schedule.rounds
        body = partial(
            decode, replace(self.pipeline, unroll=unroll), limit=sizes.burst, period=self.period,
            block=self.cache.block, filters=filters, gated=gated,
        )  # fmt: skip
        shape = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.idle_requests())
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        rest = [(shape, EVERYWHERE), (self._slots(), EVERYWHERE), (self._flight(), WAFER)]
        rest += [(scalar, EVERYWHERE), (scalar, EVERYWHERE)]
        results = [EVERYWHERE, WAFER, EVERYWHERE, EVERYWHERE, EVERYWHERE]
        compiled = self._compile(body, rest, results, donate=(2,))
        self.weight_formats, _, self.cache_formats, *_ = compiled.input_formats[0]
        self.temp_bytes = max(self.temp_bytes, compiled.memory_analysis().temp_size_in_bytes)
        return compiled

    def _prefill(self, length: int, filters: bool, score: bool):
        gated = self.pipeline.placement.wafers > 1
        body = partial(prefill, self.pipeline, gated=gated, filters=filters)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        rest = [(self._chunks(length, score), EVERYWHERE), (scalar, EVERYWHERE)]
        return self._compile(body, rest, [EVERYWHERE], donate=(2,))

    def _compile(self, body, rest: list, results: list, donate: tuple[int, ...]):
        """Compile body(weights, tables, cache, *rest) → (cache, *results); `rest` are pairs of shapes and specs."""
        specs = (self._weight_specs, WAFER, self._cache_specs, *(spec for _, spec in rest))
        mapped = jax.shard_map(
            body, mesh=self.mesh, in_specs=specs, out_specs=(self._cache_specs, *results), check_vma=False
        )

        def sharding(spec):
            return jax.tree.map(lambda s: NamedSharding(self.mesh, s), spec, is_leaf=_is_spec)

        inputs = (self.weight_formats, sharding(WAFER), self.cache_formats, *(sharding(s) for _, s in rest))
        outputs = (self.cache_formats, *map(sharding, results))
        tables = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.pipeline.tables())
        jitted = jax.jit(mapped, in_shardings=inputs, out_shardings=outputs, donate_argnums=donate)
        return jitted.lower(self.abstract_weights, tables, self.abstract_cache, *(shape for shape, _ in rest)).compile()


def _is_spec(node) -> bool:
    return isinstance(node, PartitionSpec)


def _sampling(shape: tuple[int, ...]) -> SamplingState:
    real, whole = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)
    seed = jax.ShapeDtypeStruct(shape, jnp.uint32)
    return SamplingState(temperature=real, top_k=whole, top_p=real, min_p=real, seed=seed)
