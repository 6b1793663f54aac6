"""The decode loop: rounds of ticks under one jit.

M micro-batches of B requests circulate with a period of max(M, rounds) rounds, where `rounds` is what a micro-batch
takes from entering to leaving (`partition.schedule`). In round r the wafer whose visit lags by L rounds works on
micro-batch (r − L) mod the period, on none where that is ≥ M. In the plain ring a round is one tick and wafer w lags by
w. A token is sampled as its micro-batch leaves, in time to enter again in the next round, so with M ≥ rounds no wafer
waits.
"""

import flax.struct
import jax
import jax.numpy as jnp

from jaxwafer.ops.collective import all_gather, psum, spanned
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
    """What each wafer has received for each phase: stream with leaves [wafers, phases, …], the residual stream of B
    requests of one token; start and count int32 [wafers, phases, B]."""

    stream: object
    start: jax.Array
    count: jax.Array


@flax.struct.dataclass
class Tally:
    """Counted on each wafer in each phase, float32 [wafers, phases]: ticks with work, rows (tokens) worked on, KV rows
    in live blocks of those; and [wafers, MLP stacks]: experts whose weights were read, over all cores."""

    ticks: jax.Array
    tokens: jax.Array
    kv_rows: jax.Array
    experts: jax.Array


def decode(pipeline: Pipeline, weights: dict, tables: tuple, cache: tuple, requests: Requests, slots: Slots,
           flight: Flight, begin: jax.Array, number: jax.Array, *, limit: int, period: int, block: int, gated: bool,
           filters: bool):  # fmt: skip
    """Up to `number` ≤ `limit` rounds from round `begin`, inside shard_map; stops early when no request is left.

    period: of the circulation, in rounds. Returns (cache, requests, flight, tokens int32 [limit, B] with −1 where none
    left the pipeline, rounds done, Tally).
    """
    schedule = pipeline.schedule
    weights, tables, flight = layers_local(weights), local(tables), local(flight)
    micro_batches, batch = requests.token.shape
    wafer = pipeline.wafer()
    leaving_wafer, leaving_phase, leaving_lag = schedule.exit

    def row(array, index):
        return jax.lax.dynamic_index_in_dim(array, jnp.minimum(index, micro_batches - 1), 0, keepdims=False)

    def here(now, phase):
        """The micro-batch that this wafer works on."""
        return (now - tables[phase]["lag"]) % period

    void = jnp.stack([row(slots.fresh, here(begin, phase)) for phase in range(schedule.period)])
    flight = flight.replace(count=jnp.where(void, 0, flight.count))

    def enter(now, requests):
        """The micro-batch that enters in round `now`: its stream, positions, and 1 for rows that are live."""
        first = now % period
        live = (row(requests.remaining, first) > 0) & (first < micro_batches)
        stream = pipeline.embed(weights, row(requests.token, first)[:, None])
        return stream, row(requests.position, first), live.astype(jnp.int32)

    def leave(now, requests, stream, count, out, done):
        """Sample for the micro-batch that leaves in round `now`, and note it with its requests."""
        last = (now - leaving_lag) % period
        scores, offset = pipeline.leave(weights, stream, lambda hidden: hidden[:, 0])
        # Every device must know which rows leave; the wafer of the last visit alone has them.
        left = psum(jnp.where(wafer == leaving_wafer, count, 0), "wafer") > 0
        position = row(requests.position, last) + 1
        params = jax.tree.map(lambda leaf: row(leaf, last), slots.sampling)
        token = sample(scores, offset, params, position, axes=spanned(*AXES), filters=filters)
        ended = row(requests.ends, last) & jnp.any(token[:, None] == slots.eos[None], axis=1)
        remaining = jnp.where(ended, 0, row(requests.remaining, last) - 1)

        def put(array, value):
            return array.at[last].set(jnp.where(left, value, row(array, last)), mode="drop")

        requests = requests.replace(
            token=put(requests.token, token),
            position=put(requests.position, position),
            remaining=put(requests.remaining, remaining),
        )
        return requests, out.at[done].set(jnp.where(left, token, -1))

    def tick(phase, now, done, cache, requests, flight, out, tally):
        boxes = flight.stream, flight.start, flight.count
        held = pipeline.opened(boxes, phase)
        stream, start, count = pipeline.entered(enter(now, requests), held) if phase == 0 else held
        micro_batch = here(now, phase)
        slot = jnp.minimum(micro_batch, micro_batches - 1) * batch + jnp.arange(batch, dtype=jnp.int32)
        step = Step(start=start, count=count, table=row(slots.table, micro_batch), slot=slot)
        stream, cache, touched = pipeline.stage(phase, weights, tables, cache, stream, step, gated=gated)
        read = jnp.where(count > 0, (start + block) // block * block, 0)
        tally = Tally(
            ticks=tally.ticks.at[phase].add(jnp.any(count > 0).astype(jnp.float32)),
            tokens=tally.tokens.at[phase].add(jnp.sum(count).astype(jnp.float32)),
            kv_rows=tally.kv_rows.at[phase].add(jnp.sum(read).astype(jnp.float32)),
            experts=tally.experts + touched,
        )
        if phase == leaving_phase:
            requests, out = leave(now, requests, stream, count, out, done)
        flight = Flight(*pipeline.hop(phase, tables, boxes, (stream, start, count)))
        return cache, requests, flight, out, tally

    def one_round(carry):
        done, *state = carry
        for phase in range(schedule.period):
            state = tick(phase, begin + done, done, *state)
        return done + 1, *state

    def more(carry):
        done, _, requests, *_ = carry
        return (done < number) & jnp.any(requests.remaining > 0)

    counts = jnp.zeros((schedule.period,), jnp.float32)
    experts = jnp.zeros((len(pipeline.placement.mlps),), jnp.float32)
    carry = (
        jnp.zeros((), jnp.int32), cache, requests, flight, jnp.full((limit, batch), -1, jnp.int32),
        Tally(ticks=counts, tokens=counts, kv_rows=counts, experts=experts),
    )  # fmt: skip
    done, cache, requests, flight, out, tally = jax.lax.while_loop(more, one_round, carry)
    tally = tally.replace(experts=psum(tally.experts, "core"))
    # The host reads it, which may have no part in other wafers.
    everywhere = jax.tree.map(lambda leaf: all_gather(leaf, "wafer", dim=0), stacked(tally))
    return cache, requests, stacked(flight), out, done, everywhere
