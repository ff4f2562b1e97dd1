"""When a replica has been silent for too long, though requests wait there: its engine hangs, while ``/health`` is well.

Theory of operation. Any byte of any answer is progress. Silence counts from the last one, or from when the oldest
waiting stream was sent there, whichever is later. Only streams count, for other answers are silent until they are
whole. Engines prefill in the order of arrival, so at the latest the oldest one's first byte must come, after its own
prefill: its uncached tokens at the measured rate, ``SLACK`` times over, are allowed on top of the setting. So a long
prompt has its time, and what waits behind it does not hide a hang. And what the pool shows by itself counts: a silence
that ended well is usual, and ``SLACK`` times the longest usual one is always allowed. Usual ones are forgotten by half
in ``SILENCE_HALF_LIFE_S``, so that one bad moment does not make the router blind for a day.

Where the engine's counters can be read and stand still, only one of its steps is allowed for, however long the prompt,
because each step moves them.

When a replica that does answer is so much slower than its peers that it is better left alone.

Theory of operation. Four times a second the replicas of a pool are looked at beside each other; two figures tell.

*Pace*: how long ago the streams under way there had their last byte, at the median. A replica trickles when that is
over ``TRICKLE_S`` and over ``PEERS`` times what its peers show, at every look for the whole of ``stall_s``. What waits
for its prefill there has its time, for an engine may stand still meanwhile: what ``prefill_allowance_s`` gives its
tokens comes on top.

*Lateness*: how much longer streams have waited for their first byte than ``prefill_allowance_s`` gives all that was
ahead of them, at the rate that the replica itself has shown. A replica is late when that is over ``stall_s`` and over
``LATE_PEERS`` times what its peers showed of late, unless it is fuller than they are: where it answers prompts of
``FULLER`` times as many tokens, they wait for room, and the engine is well. Whoever observes asks for both allowances.

One stream proves nothing: ``FEWEST`` must agree, for a grammar to compile, an image to fetch or a tool call that is
held back are one request's own affair. Without a peer that works nobody is slow, and what all suffer from is
nobody's fault. A replica that is probed is judged by its one request, and is nobody's measure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from statistics import median
from typing import Final, NamedTuple

from routing.types import ReplicaId

SLACK: Final = 3.0
UNMEASURED_RATE: Final = 1000.0  # tokens/s, while no replica has shown how fast it is: a slow one must not look hung
SILENCE_HALF_LIFE_S: Final = 300.0
STEP_TOKENS: Final = 8192  # that an engine prefills in one step at most: vLLM's default for API servers
UNMEASURED_STEP: Final = 1.5  # times stall_s that a step may take while no replica has shown how fast it is


class TypicalSilence:
    """How long the replicas of one pool are silent and then go on."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._at_s = 0.0

    def ended(self, silence_s: float, now_s: float) -> None:
        """A silence of at least so many seconds ended with a byte."""
        if silence_s > self.longest_s(now_s):
            self._longest_s, self._at_s = silence_s, now_s

    def longest_s(self, now_s: float) -> float:
        """The longest of late, in seconds."""
        return self._longest_s * 0.5 ** ((now_s - self._at_s) / SILENCE_HALF_LIFE_S) if self._longest_s else 0.0

    def allowed_s(self, stall_s: float, tokens: int, tokens_per_s: float, now_s: float) -> float:
        """What a replica may be silent, whose oldest waiting stream has ``tokens`` to prefill at this rate."""
        return max(stall_s, SLACK * self.longest_s(now_s)) + prefill_allowance_s(tokens, tokens_per_s)

    def allowed_between_steps_s(
        self, stall_s: float, tokens: int, tokens_per_s: float, now_s: float, *, is_measured: bool
    ) -> float:
        """What the engine may take for one step, while a prompt of ``tokens`` waits; seconds."""
        step_s = prefill_allowance_s(min(tokens, STEP_TOKENS), tokens_per_s)
        if not is_measured:
            step_s = min(step_s, UNMEASURED_STEP * stall_s)
        return max(stall_s, SLACK * self.longest_s(now_s), step_s)


def prefill_allowance_s(tokens: float, tokens_per_s: float) -> float:
    """How long a prefill may take at a measured rate."""
    return SLACK * tokens / tokens_per_s


FEWEST: Final = 3  # streams
TRICKLE_S: Final = 0.5  # since the last byte at the median: less than one event a second
PEERS: Final = 10.0
LATE_PEERS: Final = 4.0
FULLER: Final = 1.5
RECENT_S: Final = 1.0
HALF_LIFE_S: Final = 10.0  # of a peer's lateness: one that has just caught up was late all the same
SMOOTHING: Final = 0.5  # what the latest look counts of a pace


class Observation(NamedTuple):
    """One replica at one moment, in seconds."""

    late_s: float = 0.0  # that ``FEWEST`` streams are late at least, or the one of a probe
    pace_s: float | None = None  # None: too few streams to tell
    measure_s: float | None = None  # the same for others to be measured by, whatever the number; None: nothing moves
    prefill_s: float = 0.0  # that what waits there takes
    is_probed: bool = False


def observation(
    lates_s: Sequence[float],
    silences_s: Sequence[float],
    prefill_s: float = 0.0,
    *,
    ended_s: float = inf,
    is_probed: bool = False,
) -> Observation:
    """Of each stream that waits, how late it is; of each one under way, how long it has been silent.

    ``ended_s``: since an answer there was complete. Where that is under ``RECENT_S`` and nothing is under way, answers
    come and go between two looks.
    """
    fewest = 1 if is_probed else FEWEST
    late_s = sorted(lates_s, reverse=True)[fewest - 1] if len(lates_s) >= fewest else 0.0
    measure_s = median(silences_s) if silences_s else 0.0 if ended_s < RECENT_S else None
    return Observation(
        max(0.0, late_s), measure_s if len(silences_s) >= fewest else None, measure_s, prefill_s, is_probed
    )


class Slowness:
    """What was seen of one pool. ``held`` tells of a replica how many prompt tokens it answers, by its weight."""

    def __init__(self) -> None:
        self._lates: dict[ReplicaId, tuple[float, float]] = {}  # the greatest of late, and when
        self._paces: dict[ReplicaId, float] = {}
        self._trickles_since: dict[ReplicaId, float] = {}

    def judge(
        self,
        observations: Mapping[ReplicaId, Observation],
        stall_s: float,
        now_s: float,
        held: Callable[[ReplicaId], float],
    ) -> Iterator[tuple[ReplicaId, str]]:
        """Who is too slow, and why. O(replicas); where somebody might be, they are put in order once."""
        self._remember(observations, now_s)
        measures = [replica for replica, seen in observations.items() if not seen.is_probed]
        paces = _Peers([replica for replica in measures if replica in self._paces], self._paces.__getitem__)
        lates = _Peers(measures, lambda replica: self._faded_s(replica, now_s))
        fullness = _Peers(measures, held)
        for replica, seen in observations.items():
            if len(measures) == (0 if seen.is_probed else 1):
                continue
            if self._trickles(replica, seen, paces, now_s) >= stall_s:
                yield replica, f"its streams get a byte in {2 * self._paces[replica]:.1f} s"
            elif (
                seen.late_s > stall_s  # few are, so that hardly ever anybody is compared
                and seen.late_s > LATE_PEERS * lates.median(replica)
                and not _is_fuller(held(replica), fullness.median(replica))
            ):
                yield replica, f"its streams wait {seen.late_s:.1f} s longer than their prefill takes"

    def _remember(self, observations: Mapping[ReplicaId, Observation], now_s: float) -> None:
        for known in (self._lates, self._paces, self._trickles_since):
            for replica in known.keys() - observations.keys():
                del known[replica]
        for replica, seen in observations.items():
            if seen.late_s >= self._faded_s(replica, now_s):
                self._lates[replica] = seen.late_s, now_s
            if seen.measure_s is None:
                self._paces.pop(replica, None)
            else:
                before = self._paces.get(replica, seen.measure_s)
                self._paces[replica] = before + SMOOTHING * (seen.measure_s - before)

    def _trickles(self, replica: ReplicaId, seen: Observation, paces: _Peers, now_s: float) -> float:
        """For how many seconds it has trickled."""
        if seen.pace_s is not None:
            pace_s = self._paces[replica]
            if pace_s > TRICKLE_S + seen.prefill_s and pace_s > PEERS * paces.median(replica) + seen.prefill_s:
                return now_s - self._trickles_since.setdefault(replica, now_s)
        self._trickles_since.pop(replica, None)
        return 0.0

    def _faded_s(self, replica: ReplicaId, now_s: float) -> float:
        late_s, at_s = self._lates.get(replica, (0.0, now_s))
        return late_s * 0.5 ** ((now_s - at_s) / HALF_LIFE_S) if late_s else 0.0


class _Peers:
    """A figure of each replica that others are measured by, read and put in order once somebody asks."""

    __slots__ = ("_ascending", "_figure", "_figures", "_replicas")

    def __init__(self, replicas: Sequence[ReplicaId], figure: Callable[[ReplicaId], float]) -> None:
        self._replicas = replicas
        self._figure = figure
        self._figures: dict[ReplicaId, float] = {}
        self._ascending: list[float] = []

    def median(self, replica: ReplicaId) -> float:
        """The low median of all but one replica; infinity, which nothing is above, where there is nobody else."""
        if not self._ascending:
            self._figures = {name: self._figure(name) for name in self._replicas}
            self._ascending = sorted(self._figures.values())
        own, count = self._figures.get(replica), len(self._ascending)
        if count == (0 if own is None else 1):
            return inf
        if own is None:
            return self._ascending[(count - 1) // 2]
        middle = (count - 2) // 2
        return self._ascending[middle + (bisect_left(self._ascending, own) <= middle)]


def _is_fuller(mine: float, theirs: float) -> bool:
    return mine > 0 and mine > FULLER * theirs
