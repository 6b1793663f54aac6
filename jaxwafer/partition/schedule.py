"""When each visit of a route runs: a static modulo schedule.

Time is cut into ticks, and ticks come in rounds of `period`; a tick's place in its round is its phase. Every wafer
makes at most one visit in each phase, so one program with `period` phases runs any number of rounds, and a micro-batch
can enter in every round. The plain ring is the case period = 1, in which each visit follows the last by one tick.
"""

from dataclasses import dataclass

import numpy as np

from jaxwafer.errors import UserError
from jaxwafer.partition.plan import Partition, Visit

# Steps of the search for a schedule of one period before a longer one is tried.
MAX_STEPS = 200_000


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """times[v]: ticks after a micro-batch entered at which visit v runs; times[0] = 0. period: phases in a round."""

    visits: tuple[Visit, ...]
    times: tuple[int, ...]
    period: int
    wafers: int

    @property
    def rounds(self) -> int:
        """Rounds from entering to leaving, the first included: as many micro-batches fill the pipeline."""
        return self.times[-1] // self.period + 1

    @property
    def entry(self) -> int:
        """The wafer of the first visit, in phase 0."""
        return self.visits[0].wafer

    @property
    def exit(self) -> tuple[int, int, int]:
        """Wafer, phase and lag in rounds of the last visit."""
        lag, phase = divmod(self.times[-1], self.period)
        return self.visits[-1].wafer, phase, lag

    def at(self, wafer: int, phase: int) -> int | None:
        """The visit of a wafer in a phase, or None."""
        return next((v for v in self._during(phase) if self.visits[v].wafer == wafer), None)

    def lags(self, phase: int) -> np.ndarray:
        """Rounds since the micro-batch of each wafer's visit in `phase` entered, int32 [wafers]; 0 without a visit."""
        visits = (self.at(w, phase) for w in range(self.wafers))
        return np.array([0 if v is None else self.times[v] // self.period for v in visits], np.int32)

    def hops(self, phase: int) -> list[tuple[int, int]]:
        """(from, to) wafers at the end of a phase: no wafer sends or receives twice."""
        return [(self.visits[v].wafer, self.visits[v + 1].wafer) for v in self._leaving(phase)]

    def inbox(self, phase: int) -> np.ndarray:
        """The phase in which each wafer runs what arrives at the end of `phase`, int32 [wafers]; `period`: none."""
        box = np.full(self.wafers, self.period, np.int32)
        for v in self._leaving(phase):
            box[self.visits[v + 1].wafer] = self.times[v + 1] % self.period
        return box

    def _during(self, phase: int) -> list[int]:
        return [v for v, t in enumerate(self.times) if t % self.period == phase]

    def _leaving(self, phase: int) -> list[int]:
        return [v for v in self._during(phase) if v + 1 < len(self.visits)]


def schedule(partition: Partition) -> Schedule:
    """The shortest period for which a schedule is found, from the most visits of any wafer up.

    For each visit in order the earliest tick is taken at which its wafer is free in that phase, the last visit's result
    has arrived, and no other result arrives at that wafer at the same time; a dead end is backed out of.
    """
    visits = partition.visits
    counts = np.bincount([v.wafer for v in visits], minlength=partition.wafers)
    for period in range(int(counts.max()), len(visits) + 1):
        times = _search(visits, period)
        if times is not None:
            return Schedule(visits=visits, times=times, period=period, wafers=partition.wafers)
    raise UserError(f"no schedule of {len(visits)} visits over {partition.wafers} wafers was found")


def _search(visits: tuple[Visit, ...], period: int) -> tuple[int, ...] | None:
    times, waits = [0], [0]
    busy, arriving = {(visits[0].wafer, 0)}, set()
    for _ in range(MAX_STEPS):
        if len(times) == len(visits):
            return tuple(times)
        wafer, last = visits[len(times)].wafer, times[-1]
        wait = waits[-1] + 1
        # An arrival is kept until its phase comes round: a later one of the same phase would overwrite it.
        if wait > period:
            if len(times) == 1:
                return None
            waits.pop()
            gone = times.pop()
            busy.discard((visits[len(times)].wafer, gone % period))
            arriving.discard((visits[len(times)].wafer, times[-1] % period))
            continue
        waits[-1] = wait
        if (wafer, (last + wait) % period) in busy or (wafer, last % period) in arriving:
            continue
        times.append(last + wait)
        waits.append(0)
        busy.add((wafer, (last + wait) % period))
        arriving.add((wafer, last % period))
    return None
