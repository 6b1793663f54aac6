"""The compiled programs of one engine: one decode and a few prefill shapes, each compiled once and counted.

The first program is compiled with automatic layouts for weights and caches; they are then allocated in the formats it
asks for, and every later program takes them as they are.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxwafer.cache.kv import CacheShape
from jaxwafer.ops.sampling.api import SamplingState
from jaxwafer.partition import tree
from jaxwafer.pipeline.decode import Flight, Requests, Slots, decode
from jaxwafer.pipeline.prefill import Chunks, prefill
from jaxwafer.pipeline.stream import HOST
from jaxwafer.pipeline.tick import Pipeline

# A TPU's XLA would bring whole stacks of weights into fast memory ahead of branches that read one layer of them.
TPU_OPTIONS = {"xla_vf_vmem_max_outstanding_prefetches": "0"}
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


@dataclass(frozen=True, kw_only=True)
class Program:
    """body(weights, tables, cache, *rest) → (cache, *results). rest: pairs of shapes and specs; results: specs."""

    body: Callable
    rest: list[tuple]
    results: list[PartitionSpec]


class Programs:
    """Compiles on first use. `compiles` and `seconds` count; `temp_bytes`: the largest temporary of decoding.

    Where the mesh is abstract there is nothing to compile for; its programs can be exported.
    """

    def __init__(self, pipeline: Pipeline, cache: CacheShape, mesh: Mesh | AbstractMesh, sizes: Sizes):
        self.pipeline, self.cache, self.mesh, self.sizes = pipeline, cache, mesh, sizes
        self.compiles, self.seconds, self.temp_bytes = 0, 0.0, 0
        self._compiled: dict[tuple, object] = {}
        self.period = max(sizes.micro_batches, pipeline.schedule.rounds)
        self.abstract_weights = tree.abstract(pipeline.placement, pipeline.ops.platform)
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

    def unrolled(self, only: str | None = None):
        """`decode` without a loop over layers: XLA's counts of its one loop's body are those of a round of ticks. only:
        as `Stage` has it."""
        return self._get(("decode", False, True, only))

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

    def _decode(self, filters: bool, unroll: bool, only: str | None = None):
        compiled = self._compile(self.decode_program(filters=filters, unroll=unroll, only=only))
        if only:
            return compiled
        self.weight_formats, _, self.cache_formats, *_ = compiled.input_formats[0]
        self.temp_bytes = max(self.temp_bytes, compiled.memory_analysis().temp_size_in_bytes)
        return compiled

    def _prefill(self, length: int, filters: bool, score: bool):
        return self._compile(self.prefill_program(length, filters=filters, score=score))

    def decode_program(self, *, filters: bool, unroll: bool, only: str | None = None) -> Program:
        sizes = self.sizes
        gated = sizes.micro_batches < self.pipeline.schedule.rounds
        body = partial(
            decode, replace(self.pipeline, unroll=unroll, only=only), limit=sizes.burst, period=self.period,
            block=self.cache.block, filters=filters, gated=gated,
        )  # fmt: skip
        shape = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.idle_requests())
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        rest = [(shape, EVERYWHERE), (self._slots(), EVERYWHERE), (self._flight(), WAFER)]
        rest += [(scalar, EVERYWHERE), (scalar, EVERYWHERE)]
        results = [EVERYWHERE, WAFER, EVERYWHERE, EVERYWHERE, EVERYWHERE]
        return Program(body=body, rest=rest, results=results)

    def prefill_program(self, length: int, *, filters: bool, score: bool) -> Program:
        gated = self.pipeline.placement.wafers > 1
        body = partial(prefill, self.pipeline, gated=gated, filters=filters)
        scalar = jax.ShapeDtypeStruct((), jnp.int32)
        rest = [(self._chunks(length, score), EVERYWHERE), (scalar, EVERYWHERE)]
        return Program(body=body, rest=rest, results=[EVERYWHERE])

    def _compile(self, program: Program):
        options = TPU_OPTIONS if self.pipeline.ops.platform == "tpu" else None
        return (
            self._jit(program, self.weight_formats, self.cache_formats).lower(*self._shapes(program)).compile(options)
        )

    def export(self, program: Program, platform: str, unchecked: Sequence[str]) -> jax.export.Exported:
        """A program lowered for a platform as `jax.export` names it, "cuda" or "cpu"; layouts are the platform's own.

        unchecked: targets of custom calls that may be in it although no other version of JAX need have them.
        """
        formats = (
            jax.tree.map(lambda s: NamedSharding(self.mesh, s), specs, is_leaf=_is_spec)
            for specs in (self._weight_specs, self._cache_specs)
        )
        checks = [jax.export.DisabledSafetyCheck.custom_call(target) for target in unchecked]
        export = jax.export.export(self._jit(program, *formats), platforms=(platform,), disabled_checks=checks)
        # Pallas asks the mesh around it, not that of the program, what it lowers for.
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return export(*self._shapes(program))

    def _shapes(self, program: Program) -> tuple:
        tables = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.pipeline.tables())
        return self.abstract_weights, tables, self.abstract_cache, *(shape for shape, _ in program.rest)

    def _jit(self, program: Program, weight_formats, cache_formats):
        """The program on the mesh, jitted; the cache is donated."""
        specs = (self._weight_specs, WAFER, self._cache_specs, *(spec for _, spec in program.rest))
        results = (self._cache_specs, *program.results)
        mapped = jax.shard_map(program.body, mesh=self.mesh, in_specs=specs, out_specs=results, check_vma=False)

        def sharding(spec):
            return jax.tree.map(lambda s: NamedSharding(self.mesh, s), spec, is_leaf=_is_spec)

        inputs = (weight_formats, sharding(WAFER), cache_formats, *(sharding(s) for _, s in program.rest))
        outputs = (cache_formats, *map(sharding, program.results))
        return jax.jit(mapped, in_shardings=inputs, out_shardings=outputs, donate_argnums=(2,))


def _is_spec(node) -> bool:
    return isinstance(node, PartitionSpec)


def _sampling(shape: tuple[int, ...]) -> SamplingState:
    real, whole = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)
    seed = jax.ShapeDtypeStruct(shape, jnp.uint32)
    return SamplingState(temperature=real, top_k=whole, top_p=real, min_p=real, seed=seed)
