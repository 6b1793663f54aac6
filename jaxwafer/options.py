"""How a model is run, and what that makes of it on a mesh: placement, cache and programs, before a weight is read."""

from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jaxwafer.cache.kv import CacheShape, KVFormat, even_blocks
from jaxwafer.errors import UserError
from jaxwafer.model.spec import ModelSpec
from jaxwafer.ops.operations import Operations
from jaxwafer.partition.placement import Formats, place
from jaxwafer.partition.plan import Partition, uniform
from jaxwafer.pipeline.programs import Programs, Sizes
from jaxwafer.pipeline.tick import Pipeline

DTYPES = {"bf16": jnp.bfloat16, "f32": jnp.float32}
ACTIVATIONS = ("float", "int8")


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a model is run.

    mesh: WxC or a TOML file. weights: a policy of `quant.formats.POLICIES`. kv_cache: "fp8", "bf16" or "f32". dtype: of
    the activations, "bf16", "f32" or "auto", which is f32 on CPUs, whose arithmetic it is, and bf16 elsewhere.
    activations: "int8" rounds them to int8 in blocks of 32 where they meet integer weights and a kernel can, "float"
    never does. micro_batch: requests that travel together. micro_batches: in flight (default: one a wafer).
    max_context: most tokens a request may hold. block: tokens a KV block holds. kv_blocks: in the cache (default:
    enough for every slot to fill its context). prefill_chunk: most prompt tokens a tick. burst: tokens of each request
    between looks of the host. stream_weights: keep the layers' weights in host memory and bring them layer by layer.
    """

    mesh: str = "1x1"
    weights: str = "native"
    kv_cache: str = "bf16"
    dtype: str = "auto"
    activations: str = "float"
    micro_batch: int = 1
    micro_batches: int | None = None
    max_context: int = 2048
    block: int = 32
    kv_blocks: int | None = None
    prefill_chunk: int = 256
    burst: int = 8
    stream_weights: bool = False

    def __post_init__(self):
        for name in ("micro_batch", "micro_batches", "max_context", "block", "kv_blocks", "prefill_chunk", "burst"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name.replace('_', '-')} must be at least 1, not {value}")
        if self.dtype not in ("auto", *DTYPES):
            raise UserError(f"unknown compute type {self.dtype!r}; choose one of auto, {', '.join(DTYPES)}")
        if self.activations not in ACTIVATIONS:
            raise UserError(f"unknown activations {self.activations!r}; choose one of {', '.join(ACTIVATIONS)}")

    def compute_type(self, platform: str) -> str:
        """The key of `DTYPES` on devices of a platform."""
        if self.dtype == "auto":
            return "f32" if platform == "cpu" else "bf16"
        return self.dtype


def prepare(spec: ModelSpec, formats: Formats, mesh: Mesh | AbstractMesh, options: Options, *,
            partition: Partition | None = None, eos: int = 1) -> Programs:  # fmt: skip
    """The programs of a model on a mesh, none of them compiled yet. eos: number of end-of-sequence ids.

    Sizes that cannot work are UserErrors. The mesh may be of devices that are only described.
    """
    wafers, cores = mesh.axis_sizes
    partition = partition or uniform(len(spec.layers), wafers)
    if partition.wafers != wafers:
        raise UserError(f"the partition is for {partition.wafers} wafers, but the mesh {wafers}x{cores} has {wafers}")
    placement = place(spec, partition, formats, cores=cores)
    if options.max_context > spec.max_context:
        raise UserError(
            f"max-context {options.max_context} is more than the {spec.max_context} positions the model has"
        )
    platform = mesh.abstract_mesh.abstract_device.platform
    rounds = placement.schedule.rounds
    micro_batches = options.micro_batches or rounds
    table = -(-options.max_context // options.block)
    rows = micro_batches * options.micro_batch
    cache = CacheShape(
        placement=placement,
        format=KVFormat(name=options.kv_cache),
        block=options.block,
        blocks=even_blocks(placement, options.kv_blocks or rows * table),
        rows=rows,
        dtype=jnp.dtype(DTYPES[options.compute_type(platform)]),
    )
    chunk = min(options.prefill_chunk, options.max_context)
    sizes = Sizes(
        micro_batches=micro_batches,
        batch=options.micro_batch,
        blocks=table,
        burst=options.burst * max(micro_batches, rounds),
        chunks=max(8, rounds),
        chunk_tokens=tuple(n for n in (32, 64, 128, 256, 512, 1024) if n < chunk) + (chunk,),
        eos=max(1, eos),
    )
    operations = Operations(platform, options.activations == "int8")
    pipeline = Pipeline(placement, operations, cache.dtype, streamed=options.stream_weights)
    return Programs(pipeline, cache, mesh, sizes)
