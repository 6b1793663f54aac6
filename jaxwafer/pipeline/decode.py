"""The decode loop: ticks under one jit, one token of each request in flight a step.

M micro-batches of B requests circulate with period P = max(M, wafers): at tick t wafer w works on micro-batch
(t − w) mod P (on none, where that is ≥ M). Its token leaves the last wafer wafers − 1 ticks after it entered, in time
to enter the first one again at the earliest next tick, so with M ≥ wafers no wafer ever waits.
"""

import flax.struct
import jax
import jax.numpy as jnp

from jaxwafer.ops.collective import psum, spanned
from jaxwafer.ops.sampling.api import SamplingState, sample
from jaxwafer.ops.step import Step
from jaxwafer.pipeline.tick import AXES, Pipeline, layers_local, local, stacked


@flax.struct.dataclass
class Requests:
    """Requests by micro-batch and row, the same on every device.

    token: int32 [M, B], the next input. position: int32 [M, B], where its KV goes. remaining: int32 [M, B], tokens
    still to sample; 0 is a free or finished row. ends: bool [M, B], whether an end-of-sequence token finishes it.
    """

    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    ends: jax.Array


@flax.struct.dataclass
class Slots:
    """What the host alone changes: tables int32 [M, B, blocks], sampling parameters [M, B], end ids int32 [E].

    fresh: bool [M, B], rows whose request changed since the last burst; what is still in flight for them is void.
    """

    table: jax.Array
    sampling: SamplingState
    eos: jax.Array
    fresh: jax.Array


@flax.struct.dataclass
class Flight:
    """The micro-batch that each wafer receives next: x [wafers, B, 1, hidden], start and count int32 [wafers, B]."""

    x: jax.Array
    start: jax.Array
    count: jax.Array


@flax.struct.dataclass
class Tally:
    """Counted on each wafer, float32 [wafers]: ticks with work, rows (tokens) worked on, KV rows attended to; and
    [wafers, MLP stacks]: experts whose weights were read, over all cores."""

    ticks: jax.Array
    tokens: jax.Array
    kv_rows: jax.Array
    experts: jax.Array


def decode(pipeline: Pipeline, weights: dict, tables: dict, cache: tuple, requests: Requests, slots: Slots,
           flight: Flight, phase: jax.Array, ticks: jax.Array, *, limit: int, period: int, block: int, gated: bool,
           filters: bool):  # fmt: skip
    """Up to `ticks` ≤ `limit` ticks from tick `phase`, inside shard_map; stops early when no request is left.

    Returns (cache, requests, flight, tokens int32 [limit, B] with −1 where no token left the pipeline, ticks done,
    Tally).
    """
    wafers = pipeline.placement.wafers
    weights, tables, flight = layers_local(weights), local(tables), local(flight)
    micro_batches, batch = requests.token.shape
    wafer = pipeline.wafer()

    def at(tick, stage):
        """The micro-batch that stage `stage` works on, ≥ M for none."""
        return (tick - stage) % period

    def row(array, index):
        return jax.lax.dynamic_index_in_dim(array, jnp.minimum(index, micro_batches - 1), 0, keepdims=False)

    void = row(slots.fresh, at(phase, wafer))
    flight = flight.replace(count=jnp.where(void, 0, flight.count))

    def tick(carry):
        done, cache, requests, flight, out, tally = carry
        now = phase + done
        here, first, last = at(now, wafer), at(now, 0), at(now, wafers - 1)

        begins = (row(requests.remaining, first) > 0) & (first < micro_batches)
        start = jnp.where(wafer == 0, row(requests.position, first), flight.start)
        count = jnp.where(wafer == 0, begins.astype(jnp.int32), flight.count)
        x = pipeline.enter(weights, row(requests.token, first)[:, None], flight.x)
        slot = jnp.minimum(here, micro_batches - 1) * batch + jnp.arange(batch, dtype=jnp.int32)
        step = Step(start=start, count=count, table=row(slots.table, here), slot=slot)
        x, cache, touched = pipeline.stage(weights, tables, cache, x, step, gated=gated)
        read = jnp.where(count > 0, (start + block) // block * block, 0)
        tally = Tally(
            ticks=tally.ticks + jnp.any(count > 0).astype(jnp.float32),
            tokens=tally.tokens + jnp.sum(count).astype(jnp.float32),
            kv_rows=tally.kv_rows + jnp.sum(read).astype(jnp.float32),
            experts=tally.experts + touched,
        )

        scores, offset = pipeline.leave(weights, x[:, 0])
        # Every device must know which rows leave; the last wafer alone has them.
        left = psum(jnp.where(wafer == wafers - 1, count, 0), "wafer") > 0
        position = row(requests.position, last) + 1
        params = jax.tree.map(lambda leaf: row(leaf, last), slots.sampling)
        token = sample(scores, offset, params, position, axes=spanned(*AXES), filters=filters)
        ended = row(requests.ends, last) & jnp.any(token[:, None] == slots.eos[None], axis=1)
        remaining = jnp.where(ended, 0, row(requests.remaining, last) - 1)

        def put(array, value):
            """The micro-batch's rows, where one left."""
            return array.at[last].set(jnp.where(left, value, row(array, last)), mode="drop")

        requests = requests.replace(
            token=put(requests.token, token),
            position=put(requests.position, position),
            remaining=put(requests.remaining, remaining),
        )
        out = out.at[done].set(jnp.where(left, token, -1))
        x, start, count = pipeline.hop((x, start, count))
        return done + 1, cache, requests, Flight(x=x, start=start, count=count), out, tally

    def more(carry):
        done, _, requests, *_ = carry
        return (done < ticks) & jnp.any(requests.remaining > 0)

    zero = jnp.zeros((), jnp.float32)
    experts = jnp.zeros((len(pipeline.placement.mlps),), jnp.float32)
    begin = (
        jnp.zeros((), jnp.int32), cache, requests, flight,
        jnp.full((limit, batch), -1, jnp.int32), Tally(ticks=zero, tokens=zero, kv_rows=zero, experts=experts),
    )  # fmt: skip
    done, cache, requests, flight, out, tally = jax.lax.while_loop(more, tick, begin)
    tally = tally.replace(experts=psum(tally.experts, "core"))
    return cache, requests, stacked(flight), out, done, stacked(tally)
