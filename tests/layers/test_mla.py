"""Absorbed latent attention over blocks spread over cores, against attention written out head by head in NumPy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jaxwafer.layers import mla
from jaxwafer.model.kinds import MLA
from jaxwafer.model.rope import Rope
from jaxwafer.ops.operations import Operations
from jaxwafer.ops.pages import Pages, power_of_two, to_fp8
from jaxwafer.ops.step import Step
from jaxwafer.quant.array import QuantizedArray
from jaxwafer.quant.formats import FORMATS

# Every size differs from every other; three heads are padded on two cores and on four.
HIDDEN, HEADS, NOPE, ROPE, VALUE, RANK, Q_RANK = 24, 3, 5, 4, 7, 8, 6
BLOCK, COLUMNS, LAYER, T = 4, 8, 1, 3
LENGTHS, COUNTS = [3, 4, 5, 9, 32, 30, 6], [3, 1, 2, 3, 1, 3, 0]


def kind(**changes) -> MLA:
    base = {"hidden": HIDDEN, "heads": HEADS, "nope": NOPE, "rope_dims": ROPE, "value_dim": VALUE, "rank": RANK,
            "rope": Rope(theta=100.0, dims=ROPE, interleaved=True), "scale": 0.4, "eps": 1e-3,
            "q_rank": Q_RANK}  # fmt: skip
    return MLA(**(base | changes))


KINDS = {
    "rope": kind(),
    "halves": kind(rope=Rope(theta=100.0, dims=ROPE), q_rank=None),
    "nope": kind(rope=None, q_rank=None),
    "gate": kind(rope=None, gate=True),
}


def weights(kind: MLA) -> dict[str, np.ndarray]:
    """Two layers of every weight, [2, …], without padding."""
    rng = np.random.default_rng(0)
    drawn = {w.name: (w.matrix, rng.standard_normal((2, *w.shape)).astype(np.float32)) for w in kind.weights()}
    return {n: a / np.sqrt(a.shape[-1]) * 1.5 if matrix else 1 + 0.2 * a for n, (matrix, a) in drawn.items()}


def placed(kind: MLA, plain: dict, cores: int) -> tuple[dict, dict]:
    """The weights as all cores hold them, and their sharding."""
    arrays, specs = {}, {}
    for weight in kind.weights():
        array = plain[weight.name]
        for number, axis in enumerate(weight.axes, 1):
            index = axis.placed(axis.shards(1, cores))
            array = np.take(array, np.maximum(index, 0), number) * np.expand_dims(
                index >= 0, [n for n in range(array.ndim) if n != number]
            )
        spec = PartitionSpec(None, *("core" if a.mesh_axes else None for a in weight.axes))
        array = jnp.asarray(array, jnp.float32)
        arrays[weight.name] = QuantizedArray(array, None, None, format=FORMATS["f32"]) if weight.matrix else array
        specs[weight.name] = QuantizedArray(spec, None, None, format=FORMATS["f32"]) if weight.matrix else spec
    return arrays, specs


def rms(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + eps) * weight


def turned(kind: MLA, x: np.ndarray) -> np.ndarray:
    """x [L, …, rope_dims] of positions 0 to L − 1, rotated pair by pair."""
    if kind.rope is None:
        return x
    out = np.array(x)
    for pair, frequency in enumerate(kind.rope.frequencies().astype(np.float64)):
        i, j = (2 * pair, 2 * pair + 1) if kind.rope.interleaved else (pair, pair + ROPE // 2)
        angle = (np.arange(len(x)) * frequency).reshape(-1, *(1,) * (x.ndim - 2))
        out[..., i] = x[..., i] * np.cos(angle) - x[..., j] * np.sin(angle)
        out[..., j] = x[..., j] * np.cos(angle) + x[..., i] * np.sin(angle)
    return out


def rows(kind: MLA, plain: dict, x: np.ndarray) -> np.ndarray:
    """What the cache holds of x [L, hidden], [L, rank + rope_dims]."""
    p = {n: a[LAYER].astype(np.float64) for n, a in plain.items()}
    row = rms(x, p["norm"], kind.eps) @ p["kv_a"].T
    return np.concatenate([rms(row[:, :RANK], p["kv_a_norm"], 1e-6), turned(kind, row[:, RANK:])], -1)


def expected(kind: MLA, plain: dict, x: np.ndarray, cached: np.ndarray) -> np.ndarray:
    """The mixer's output for x [L, hidden], with each head's keys and values written out from the cached rows."""
    p, length = {n: a[LAYER].astype(np.float64) for n, a in plain.items()}, len(x)
    normed = rms(x, p["norm"], kind.eps)
    low = normed if kind.q_rank is None else rms(normed @ p["q_a"].T, p["q_a_norm"], 1e-6)
    q = (low @ p["q"].T).reshape(length, HEADS, NOPE + ROPE)
    q = np.concatenate([q[..., :NOPE], turned(kind, q[..., NOPE:])], -1)
    k = (cached[:, :RANK] @ p["k_b"].T).reshape(length, HEADS, NOPE)
    v = (cached[:, :RANK] @ p["v_b"].T).reshape(length, HEADS, VALUE)
    out = np.zeros((length, HEADS, VALUE))
    for h in range(HEADS):
        for t in range(length):
            keys = np.concatenate([k[: t + 1, h], cached[: t + 1, RANK:]], -1)
            score = np.exp(kind.scale * keys @ q[t, h])
            out[t, h] = score / score.sum() @ v[: t + 1, h]
    out = out.reshape(length, -1)
    if kind.gate:
        out /= 1 + np.exp(-(normed @ p["gate"].T))
    return out @ p["o"].T


def stored(array: np.ndarray, form: str) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """Rows in a cache format: values, exponents, and what they are read as."""
    if form == "fp8":
        values, exponent = map(np.asarray, to_fp8(jnp.asarray(array, jnp.float32)))
        return values, exponent, values.astype(np.float64) * np.asarray(power_of_two(exponent))[..., None]
    values = np.asarray(jnp.asarray(array, {"bf16": jnp.bfloat16, "f32": jnp.float32}[form]))
    return values, None, values.astype(np.float64)


@partial(jax.jit, static_argnames=("kind", "mesh", "specs"))
def phases(kind, mesh, specs, arrays, x, latent, step):
    """All phases of the mixer with the writes between them, summed over cores: [B, T, hidden]."""
    ops, layer = Operations("cpu"), jnp.int32(LAYER)

    def core(arrays, x, latent, step):
        carry, new = mla.project(kind, arrays, layer, x, step, {"latent": latent}, ops)
        carry = mla.exchange(kind, carry)
        block, offset = step.rows(T, BLOCK)
        block = block - jax.lax.axis_index("core").astype(jnp.int32) * latent.blocks
        block = jnp.where(block < latent.blocks, block, -1)
        latent = ops.append(latent, layer, block, offset, new["latent"])
        carry = mla.combine(kind, mla.attend(kind, arrays, layer, carry, {"latent": latent}, step, ops))
        return jax.lax.psum(mla.output(kind, arrays, layer, carry, ops), "core")

    spread, none = PartitionSpec(None, "core"), PartitionSpec()
    pages = Pages(values=spread, exponent=None if latent.exponent is None else spread)
    spec = {n: v for n, v in specs}
    return jax.shard_map(core, mesh=mesh, in_specs=(spec, none, pages, none), out_specs=none, check_vma=False)(
        arrays, x, latent, step
    )


def check(kind: MLA, cores: int, form: str, atol: float, owners: str = "any") -> None:
    """Requests of LENGTHS tokens, of which the last COUNTS come now, in blocks dealt at random over the cores."""
    rng, plain = np.random.default_rng(1), weights(kind)
    batch = len(LENGTHS)
    blocks = -(-(batch * COLUMNS + 3) // cores) * cores
    if owners == "last":
        # Every block on the last core: the others have nothing to say.
        blocks *= cores
        table = blocks - 1 - rng.permutation(blocks // cores)[: batch * COLUMNS].reshape(batch, COLUMNS)
    else:
        table = rng.permutation(blocks)[: batch * COLUMNS].reshape(batch, COLUMNS)
    width = RANK + ROPE
    values = np.full((2, blocks, BLOCK, 1, width), np.nan, stored(np.zeros(1), form)[0].dtype)
    exponent = np.zeros(values.shape[:-1], np.int8) if form == "fp8" else None
    x, want = np.zeros((batch, T, HIDDEN), np.float32), []
    for b, (length, count) in enumerate(zip(LENGTHS, COUNTS, strict=True)):
        history = rng.standard_normal((length, HIDDEN)).astype(np.float32)
        row, power, seen = stored(rows(kind, plain, history), form)
        old = np.arange(length - count)
        at = LAYER, table[b, old // BLOCK], old % BLOCK, 0
        values[at] = row[old]
        if power is not None:
            exponent[at] = power[old]
        x[b, :count] = history[length - count :]
        want.append(expected(kind, plain, history.astype(np.float64), seen)[length - count :])
    start = np.maximum(np.array(LENGTHS) - np.array(COUNTS), 0)
    step = Step(*(jnp.asarray(a, jnp.int32) for a in (start, COUNTS, table, np.zeros(batch))))
    mesh = Mesh(np.array(jax.devices()[:cores]), ("core",))
    arrays, specs = placed(kind, plain, cores)
    latent = Pages(values=jnp.asarray(values), exponent=None if exponent is None else jnp.asarray(exponent))
    got = np.asarray(phases(kind, mesh, tuple(specs.items()), arrays, jnp.asarray(x), latent, step))
    for b, count in enumerate(COUNTS):
        np.testing.assert_allclose(got[b, :count], want[b], atol=atol, err_msg=f"request {b}")
    assert np.isfinite(got).all() and not got[COUNTS.index(0)].any()
    assert np.abs(np.concatenate(want)).mean() > 0.3


@pytest.mark.parametrize("cores", [1, 2, 4])
@pytest.mark.parametrize("name", KINDS)
def test_it_is_attention_with_keys_and_values_written_out(name, cores):
    check(KINDS[name], cores, "f32", 3e-6)


@pytest.mark.parametrize("cores", [1, 2])
@pytest.mark.parametrize("form", ["fp8", "bf16"])
def test_narrow_caches_are_read_as_what_they_hold(form, cores):
    check(KINDS["rope"], cores, form, 2e-5)


def test_cores_without_a_block_of_a_request_add_nothing():
    check(KINDS["rope"], 4, "f32", 3e-6, owners="last")


def test_flops_beside_the_matrices_are_scores_over_the_row_and_values_over_its_latent():
    assert KINDS["rope"].flops(10) == 2 * HEADS * 10 * (RANK + ROPE) + 2 * HEADS * 10 * RANK
