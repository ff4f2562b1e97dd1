"""Limits on how long a replica may send nothing (hung), and how much slower than its peers it may be (slow).

Theory of operation, hung. Any byte of any response is progress. Silence counts from the last byte, or from when the
oldest waiting stream was sent, whichever is later. Only streams count, because other responses have no byte until they
are complete. Engines prefill in the order of arrival, so the oldest stream's first byte must come after its own
prefill at the latest: the time that its uncached tokens take at the measured rate, ``SLACK_RATIO`` times over, is
allowed on top of ``stall_s``. So a long prompt has its time, and requests queued behind it do not hide a hang. A pool
also shows what is typical: ``SLACK_RATIO`` times the longest silence that ended with a byte is always allowed. That
maximum halves every ``SILENCE_HALF_LIFE_S``, so that one long pause does not disable detection for a day. If the
engine's counters can be read and stand still, only one of its steps is allowed for, however long the prompt, because
each step moves them.

Theory of operation, slow. Four times a second the replicas of a pool are compared by two measures.

*Pace*: median time since the last byte of the streams in progress. A replica trickles when that exceeds ``TRICKLE_S``
and ``TRICKLE_PEER_RATIO`` times the pace of its peers in every observation for the whole of ``stall_s``. An engine may
pause streams to prefill, so ``prefill_allowance_s`` of the queued tokens is allowed on top.

*Lateness*: how much longer streams have waited for their first byte than ``prefill_allowance_s`` of the tokens queued
before them, at the replica's own measured rate. A replica is late when that exceeds ``stall_s`` and ``LATE_PEER_RATIO``
times the recent lateness of its peers, unless it is fuller: with ``FULLER_RATIO`` times as many tokens in progress,
requests wait for KV blocks and the engine works.

``MIN_STREAMS`` streams must agree, because a grammar to compile, an image to fetch or a tool call that is held back
delays one request only. Without a working peer no replica is slow, since what affects all of them is no replica's
fault. A replica that is probed is evaluated by its one request, and is no peer of others.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from statistics import median
from typing import Final, NamedTuple

from routing.engines import STEP_TOKENS
from routing.types import ReplicaId

SLACK_RATIO: Final = 3.0  # allowed duration / expected duration
UNMEASURED_RATE: Final = 1000.0  # tokens/s, until any replica's rate was measured: a slow one must not look hung
SILENCE_HALF_LIFE_S: Final = 300.0
UNMEASURED_STEP_RATIO: Final = 1.5  # allowed duration of a step / ``stall_s``, until any replica's rate was measured


class TypicalSilence:
    """The longest recent silence of one pool's replicas that ended with a byte."""

    def __init__(self) -> None:
        self._longest_s = 0.0
        self._recorded_s = 0.0

    def record(self, silence_s: float, now_s: float) -> None:
        """Record a silence of at least ``silence_s`` that ended with a byte."""
        if silence_s > self.longest_s(now_s):
            self._longest_s, self._recorded_s = silence_s, now_s

    def longest_s(self, now_s: float) -> float:
        """The longest recorded silence, halved every ``SILENCE_HALF_LIFE_S``."""
        return self._longest_s * 0.5 ** ((now_s - self._recorded_s) / SILENCE_HALF_LIFE_S) if self._longest_s else 0.0

    def allowed_s(self, stall_s: float, tokens: int, tokens_per_s: float, now_s: float) -> float:
        """Allowed silence of a replica whose oldest waiting stream has ``tokens`` to prefill at this rate."""
        return max(stall_s, SLACK_RATIO * self.longest_s(now_s)) + prefill_allowance_s(tokens, tokens_per_s)

    def allowed_between_steps_s(
        self, stall_s: float, tokens: int, tokens_per_s: float, now_s: float, *, is_measured: bool
    ) -> float:
        """Allowed duration of one engine step while a prompt of ``tokens`` waits."""
        step_s = prefill_allowance_s(min(tokens, STEP_TOKENS), tokens_per_s)
        if not is_measured:
            step_s = min(step_s, UNMEASURED_STEP_RATIO * stall_s)
        return max(stall_s, SLACK_RATIO * self.longest_s(now_s), step_s)


def prefill_allowance_s(tokens: float, tokens_per_s: float) -> float:
    """Allowed duration of a prefill at a measured rate."""
    return SLACK_RATIO * tokens / tokens_per_s


MIN_STREAMS: Final = 3  # a replica with fewer slow streams is not slow
TRICKLE_S: Final = 0.5  # since the last byte at the median: less than one event a second
TRICKLE_PEER_RATIO: Final = 10.0  # times the pace of the peers
LATE_PEER_RATIO: Final = 4.0  # times the lateness of the peers
FULLER_RATIO: Final = 1.5  # times the fullness of the peers
RECENT_S: Final = 1.0  # since a complete response
HALF_LIFE_S: Final = 10.0  # of a peer's lateness, because a peer that has just caught up was late recently
SMOOTHING: Final = 0.5  # weight of the latest observation in a pace


class Observation(NamedTuple):
    """Pace and lateness of one replica at one time, in seconds."""

    late_s: float = 0.0  # minimum lateness of ``MIN_STREAMS`` streams, or of a probe
    pace_s: float | None = None  # None: too few streams
    peer_pace_s: float | None = None  # the pace for comparison, of any number of streams; None: no response in progress
    prefill_s: float = 0.0  # allowed for the queued tokens
    is_probed: bool = False


def observe_streams(
    lateness_s: Sequence[float],
    silences_s: Sequence[float],
    prefill_s: float = 0.0,
    *,
    ended_s: float = inf,
    is_probed: bool = False,
) -> Observation:
    """Compute an observation from the lateness of waiting streams and the silences of streams in progress.

    ``silences_s``: seconds since the last byte of each stream. ``ended_s``: seconds since a response was complete;
    under ``RECENT_S``, with no stream in progress, responses start and end between two observations.
    """
    min_streams = 1 if is_probed else MIN_STREAMS
    late_s = sorted(lateness_s, reverse=True)[min_streams - 1] if len(lateness_s) >= min_streams else 0.0
    peer_pace_s = median(silences_s) if silences_s else 0.0 if ended_s < RECENT_S else None
    pace_s = peer_pace_s if len(silences_s) >= min_streams else None
    return Observation(max(0.0, late_s), pace_s, peer_pace_s, prefill_s, is_probed)


class Slowness:
    """Compares the replicas of one pool."""

    def __init__(self) -> None:
        self._latenesses: dict[ReplicaId, tuple[float, float]] = {}  # greatest recent one, and when it was observed
        self._paces: dict[ReplicaId, float] = {}
        self._trickles_since: dict[ReplicaId, float] = {}

    def evaluate(
        self,
        observations: Mapping[ReplicaId, Observation],
        stall_s: float,
        now_s: float,
        fullness: Callable[[ReplicaId], float],
    ) -> Iterator[tuple[ReplicaId, str]]:
        """The slow replicas, and why. O(replicas); peers are sorted once if a replica may be slow.

        ``fullness``: prompt tokens in progress at a replica, relative to its weight.
        """
        self._update(observations, now_s)
        peers = [replica for replica, observation in observations.items() if not observation.is_probed]
        paces = _Peers([replica for replica in peers if replica in self._paces], self._paces.__getitem__)
        latenesses = _Peers(peers, lambda replica: self._recent_lateness_s(replica, now_s))
        fullnesses = _Peers(peers, fullness)
        for replica, observation in observations.items():
            if len(peers) == (0 if observation.is_probed else 1):
                continue
            if self._trickled_s(replica, observation, paces, now_s) >= stall_s:
                yield replica, f"its streams get one byte every {2 * self._paces[replica]:.1f} s"
            elif (
                observation.late_s > stall_s  # rarely true, so that peers are rarely compared
                and observation.late_s > LATE_PEER_RATIO * latenesses.median(replica)
                and not _is_fuller(fullness(replica), fullnesses.median(replica))
            ):
                yield replica, f"its streams wait {observation.late_s:.1f} s longer than their prefill takes"

    def _update(self, observations: Mapping[ReplicaId, Observation], now_s: float) -> None:
        for state in (self._latenesses, self._paces, self._trickles_since):
            for replica in state.keys() - observations.keys():
                del state[replica]
        for replica, observation in observations.items():
            if observation.late_s >= self._recent_lateness_s(replica, now_s):
                self._latenesses[replica] = observation.late_s, now_s
            if observation.peer_pace_s is None:
                self._paces.pop(replica, None)
            else:
                before = self._paces.get(replica, observation.peer_pace_s)
                self._paces[replica] = before + SMOOTHING * (observation.peer_pace_s - before)

    def _trickled_s(self, replica: ReplicaId, observation: Observation, paces: _Peers, now_s: float) -> float:
        """For how many seconds a replica has trickled."""
        if observation.pace_s is not None:
            pace_s = self._paces[replica]
            if (
                pace_s > TRICKLE_S + observation.prefill_s
                and pace_s > TRICKLE_PEER_RATIO * paces.median(replica) + observation.prefill_s
            ):
                return now_s - self._trickles_since.setdefault(replica, now_s)
        self._trickles_since.pop(replica, None)
        return 0.0

    def _recent_lateness_s(self, replica: ReplicaId, now_s: float) -> float:
        late_s, observed_s = self._latenesses.get(replica, (0.0, now_s))
        return late_s * 0.5 ** ((now_s - observed_s) / HALF_LIFE_S) if late_s else 0.0


class _Peers:
    """One measure of the replicas of a pool, computed and sorted on first use."""

    def __init__(self, replicas: Sequence[ReplicaId], measure: Callable[[ReplicaId], float]) -> None:
        self._replicas = replicas
        self._measure = measure
        self._values: dict[ReplicaId, float] = {}
        self._ascending: list[float] = []

    def median(self, replica: ReplicaId) -> float:
        """The low median of all other replicas; infinity, which nothing exceeds, if there are none."""
        if not self._ascending:
            self._values = {name: self._measure(name) for name in self._replicas}
            self._ascending = sorted(self._values.values())
        own, count = self._values.get(replica), len(self._ascending)
        if count == (0 if own is None else 1):
            return inf
        if own is None:
            return self._ascending[(count - 1) // 2]
        middle = (count - 2) // 2
        return self._ascending[middle + (bisect_left(self._ascending, own) <= middle)]


def _is_fuller(fullness: float, peer_fullness: float) -> bool:
    return fullness > 0 and fullness > FULLER_RATIO * peer_fullness
