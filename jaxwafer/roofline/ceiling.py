"""Rates measured on this machine, over the same devices and in the same run as what they are held against."""

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxwafer.distributed import from_leader
from jaxwafer.pipeline.stream import HOST

# Bytes read in all: several times a CPU's last-level cache; a GPU's or TPU's is smaller.
READ_BYTES = 256 << 20
TARGET_SECONDS = 0.08
AXES = ("wafer", "core")


def read_ceiling(mesh: Mesh, *, repetitions: int = 7) -> float:
    """Bytes/s at which all devices together stream float32 through a matrix-vector product, at best."""
    columns = 4096
    rows = max(1, READ_BYTES // (4 * columns) // mesh.size)
    sharding = NamedSharding(mesh, PartitionSpec(AXES))
    matrix = jax.jit(lambda: jnp.ones((mesh.size * rows, columns), jnp.float32), out_shardings=sharding)()

    def read(matrix, times):
        def once(_, x):
            # The next product needs the last one's result, so none can be left out or moved out of the loop.
            y = jnp.dot(matrix, x)
            return x + 1e-30 * jnp.max(y)

        return jax.lax.fori_loop(0, times, once, jnp.full((columns,), 1e-3, jnp.float32))[None]

    program = _mapped(mesh, read, (PartitionSpec(AXES), PartitionSpec()))
    return 4.0 * matrix.size / _seconds(partial(program, matrix), repetitions)


def compute_ceiling(mesh: Mesh, dtype, *, repetitions: int = 3) -> float:
    """FLOP/s of all devices together in a square matrix product of `dtype`; the best of `repetitions`."""
    size = 1024
    sharding = NamedSharding(mesh, PartitionSpec(AXES))
    matrix = jax.jit(lambda: jnp.full((mesh.size * size, size), 1e-3, dtype), out_shardings=sharding)()

    def multiply(matrix, times):
        return jax.lax.fori_loop(0, times, lambda _, x: jnp.dot(x, matrix), matrix)

    program = _mapped(mesh, multiply, (PartitionSpec(AXES), PartitionSpec()))
    return mesh.size * 2.0 * size**3 / _seconds(partial(program, matrix), repetitions)


def stream_ceiling(mesh: Mesh, *, repetitions: int = 3) -> float:
    """Bytes/s at which all devices together bring float32 rows from host memory, each of them read once there."""
    rows, columns = 16, max(1, READ_BYTES // (16 * 4) // mesh.size)
    sharding = NamedSharding(mesh, PartitionSpec(AXES), memory_kind=HOST)
    matrix = jax.make_array_from_callback(
        (mesh.size * rows, columns), sharding, lambda index: np.ones((rows, columns), np.float32)
    )

    def bring(matrix, times):
        def once(i, x):
            row = jax.lax.dynamic_slice_in_dim(matrix, i % rows, 1)
            return x + 1e-30 * jnp.max(jax.device_put(row, jax.memory.Space.Device))

        return jax.lax.fori_loop(0, times * rows, once, jnp.zeros((), jnp.float32))[None]

    program = _mapped(mesh, bring, (PartitionSpec(AXES), PartitionSpec()))
    return 4.0 * matrix.size / _seconds(partial(program, matrix), repetitions)


def tick_latency(mesh: Mesh, *, sums: int, shape: tuple[int, ...], repetitions: int = 3) -> float:
    """Seconds of a tick's communication alone: `sums` sums over cores, one hop and the four sums over the mesh that
    embedding, head and sampling take, on arrays of `shape` float32."""
    wafers = mesh.shape["wafer"]
    ring = [(w, (w + 1) % wafers) for w in range(wafers)]

    def tick(_, x):
        x = jax.lax.fori_loop(0, sums, lambda _, x: 0.5 * jax.lax.psum(x, "core"), x)
        x = jax.lax.fori_loop(0, 4, lambda _, x: 0.5 * jax.lax.psum(x, AXES), x)
        return jax.lax.ppermute(x, "wafer", ring)

    def run(x, times):
        return jax.lax.fori_loop(0, times, tick, x)

    program = _mapped(mesh, run, (PartitionSpec(), PartitionSpec()), out=PartitionSpec())
    x = jax.jit(lambda: jnp.zeros(shape, jnp.float32), out_shardings=NamedSharding(mesh, PartitionSpec()))()
    return _seconds(partial(program, x), repetitions)


def _mapped(mesh: Mesh, body: Callable, specs: tuple, out=PartitionSpec(AXES)) -> Callable:
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False))


def _seconds(program: Callable, repetitions: int) -> float:
    """Seconds of one turn of program(times), the least of `repetitions`, each long enough to time."""

    def run(times: int) -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(np.int32(times)))
        return time.perf_counter() - begin

    run(1)
    # Processes whose clocks differ would else make a different number of turns, and wait for each other in the last.
    times = int(from_leader(max(1, min(10_000, round(TARGET_SECONDS / max(run(1), 1e-6))))))
    return min(run(times) for _ in range(repetitions)) / times
