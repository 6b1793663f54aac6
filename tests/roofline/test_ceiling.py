"""Measured ceilings: what they divide by what, not how fast this machine is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxwafer.mesh import MeshShape, make_mesh
from jaxwafer.roofline import ceiling


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(ceiling, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(ceiling, "TARGET_SECONDS", 1e-6)


@pytest.mark.parametrize("wafers, cores", [(1, 1), (2, 2)])
def test_every_ceiling_is_a_positive_finite_number(wafers, cores):
    mesh = make_mesh(MeshShape(wafers, cores))
    figures = [
        ceiling.read_ceiling(mesh, repetitions=1),
        ceiling.compute_ceiling(mesh, jnp.float32, repetitions=1),
        ceiling.tick_latency(mesh, sums=2, shape=(2, 8), repetitions=1),
        ceiling.stream_ceiling(mesh, repetitions=1),
    ]
    assert all(type(f) is float and np.isfinite(f) and f > 0 for f in figures)


def test_a_ceiling_is_the_work_of_all_devices_over_the_seconds_of_a_turn(monkeypatch):
    """With turns said to take two seconds: 1 MiB read, and 2·1024³ FLOPs on each of four devices."""
    monkeypatch.setattr(ceiling, "_seconds", lambda program, repetitions: 2.0)
    mesh = make_mesh(MeshShape(2, 2))
    assert ceiling.read_ceiling(mesh) == (1 << 20) / 2
    assert ceiling.compute_ceiling(mesh, jnp.float32) == 4 * 2 * 1024**3 / 2
    assert ceiling.tick_latency(mesh, sums=2, shape=(1, 8)) == 2.0
    assert ceiling.stream_ceiling(mesh) == (1 << 20) / 2


def test_the_best_of_the_repetitions_is_taken_over_its_turns(monkeypatch):
    """A clock that the program moves: a turn takes one second, but each second run as much again."""
    now, runs = [0.0], []

    def program(times):
        runs.append(int(times))
        now[0] += int(times) * (2.0 if len(runs) % 2 else 1.0)
        return times

    monkeypatch.setattr(ceiling.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(ceiling, "TARGET_SECONDS", 8.0)
    assert ceiling._seconds(program, 3) == 1.0
    assert runs == [1, 1, 8, 8, 8]


def test_the_matrices_are_read_where_they_lie(monkeypatch):
    """One shard a device, so that all devices stream at once."""
    seen = []
    monkeypatch.setattr(ceiling, "_seconds", lambda program, repetitions: seen.append(program.args[0]) or 1.0)
    mesh = make_mesh(MeshShape(2, 2))
    ceiling.read_ceiling(mesh)
    (matrix,) = seen
    assert {s.device for s in matrix.addressable_shards} == set(mesh.devices.flat)
    assert {s.data.nbytes for s in matrix.addressable_shards} == {(1 << 20) // 4}
    assert isinstance(matrix, jax.Array)
