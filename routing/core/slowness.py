"""When a replica that does answer is so much slower than its peers that it is better left alone.

Theory of operation. Four times a second the replicas of a pool are looked at beside each other; two figures tell.

*Pace*: how long ago the streams under way there had their last byte, at the median. A replica trickles when that is
over ``TRICKLE_S`` and over ``PEERS`` times what its peers show, at every look for the whole of ``stall_s``. What waits
for its prefill there has its time, for an engine may stand still meanwhile: its tokens at the measured rate, ``SLACK``
times over, come on top.

*Lateness*: how much longer streams have waited for their first byte than their prefill needs, with all that was ahead
of them, ``SLACK`` times over at the rate that the replica itself has shown. A replica is late when that is over
``stall_s`` and over ``LATE_PEERS`` times what its peers showed of late, unless it is fuller than they are: where it
answers prompts of ``FULLER`` times as many tokens, they wait for room, and the engine is well.

One stream proves nothing: ``FEWEST`` must agree, for a grammar to compile, an image to fetch or a tool call that is
held back are one request's own affair. Without a peer that works nobody is slow, and what all suffer from is
nobody's fault. A replica on trial is judged by its one request, and is nobody's measure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median, median_low
from typing import Final, NamedTuple

from routing.core.silence import SLACK
from routing.core.types import ReplicaId

FEWEST: Final = 3  # streams
TRICKLE_S: Final = 0.5  # since the last byte at the median: less than one event a second
PEERS: Final = 10.0
LATE_PEERS: Final = 4.0
FULLER: Final = 1.5
RECENT_S: Final = 1.0
HALF_LIFE_S: Final = 10.0  # of a peer's lateness: one that has just caught up was late all the same
SMOOTHING: Final = 0.5  # what the latest look counts of a pace


class Look(NamedTuple):
    """One replica at one moment, in seconds."""

    late_s: float = 0.0  # that ``FEWEST`` streams are late at least, or one on trial
    pace_s: float | None = None  # None: too few streams to tell
    measure_s: float | None = None  # the same for others to be measured by, whatever the number; None: nothing moves
    prefill_s: float = 0.0  # that what waits there takes
    on_trial: bool = False


def look(
    lates_s: Sequence[float],
    silences_s: Sequence[float],
    prefill_s: float = 0.0,
    *,
    ended_s: float = float("inf"),
    on_trial: bool = False,
) -> Look:
    """Of each stream that waits, how late it is; of each one under way, how long it has been silent.

    ``ended_s``: since an answer there was complete. Where that is under ``RECENT_S`` and nothing is under way, answers
    come and go between two looks.
    """
    fewest = 1 if on_trial else FEWEST
    late_s = sorted(lates_s, reverse=True)[fewest - 1] if len(lates_s) >= fewest else 0.0
    measure_s = median(silences_s) if silences_s else 0.0 if ended_s < RECENT_S else None
    return Look(max(0.0, late_s), measure_s if len(silences_s) >= fewest else None, measure_s, prefill_s, on_trial)


class Slowness:
    """What was seen of one pool. ``held`` tells of a replica how many prompt tokens it answers, by its weight."""

    def __init__(self) -> None:
        self._lates: dict[ReplicaId, tuple[float, float]] = {}  # the greatest of late, and when
        self._paces: dict[ReplicaId, float] = {}
        self._trickles_since: dict[ReplicaId, float] = {}

    def judge(
        self, looks: Mapping[ReplicaId, Look], stall_s: float, now_s: float, held: Callable[[ReplicaId], float]
    ) -> Iterator[tuple[ReplicaId, str]]:
        """Who is too slow, and why."""
        self._remember(looks, now_s)
        for replica, seen in looks.items():
            peers = [name for name, other in looks.items() if name != replica and not other.on_trial]
            if not peers:
                continue
            if self._trickles(replica, seen, peers, now_s) >= stall_s:
                yield replica, f"its streams get a byte in {2 * self._paces[replica]:.1f} s"
            elif seen.late_s > self._late_limit_s(peers, stall_s, now_s) and not _is_fuller(replica, peers, held):
                yield replica, f"its streams wait {seen.late_s:.1f} s longer than their prefill takes"

    def _remember(self, looks: Mapping[ReplicaId, Look], now_s: float) -> None:
        for known in (self._lates, self._paces, self._trickles_since):
            for replica in known.keys() - looks.keys():
                del known[replica]
        for replica, seen in looks.items():
            if seen.late_s >= self._faded_s(replica, now_s):
                self._lates[replica] = seen.late_s, now_s
            if seen.measure_s is None:
                self._paces.pop(replica, None)
            else:
                before = self._paces.get(replica, seen.measure_s)
                self._paces[replica] = before + SMOOTHING * (seen.measure_s - before)

    def _trickles(self, replica: ReplicaId, seen: Look, peers: list[ReplicaId], now_s: float) -> float:
        """For how many seconds it has trickled."""
        theirs = [self._paces[peer] for peer in peers if peer in self._paces]
        if seen.pace_s is not None and theirs:
            limit_s = max(TRICKLE_S, PEERS * median_low(theirs)) + seen.prefill_s
            if self._paces[replica] > limit_s:
                return now_s - self._trickles_since.setdefault(replica, now_s)
        self._trickles_since.pop(replica, None)
        return 0.0

    def _late_limit_s(self, peers: list[ReplicaId], stall_s: float, now_s: float) -> float:
        return max(stall_s, LATE_PEERS * median_low(self._faded_s(peer, now_s) for peer in peers))

    def _faded_s(self, replica: ReplicaId, now_s: float) -> float:
        late_s, at_s = self._lates.get(replica, (0.0, now_s))
        return late_s * 0.5 ** ((now_s - at_s) / HALF_LIFE_S) if late_s else 0.0


def allowed_s(tokens: float, tokens_per_s: float) -> float:
    """How long a prefill may take."""
    return SLACK * tokens / tokens_per_s


def _is_fuller(replica: ReplicaId, peers: list[ReplicaId], held: Callable[[ReplicaId], float]) -> bool:
    mine = held(replica)
    return mine > 0 and mine > FULLER * median_low(map(held, peers))
