"""Puts the messages of one engine in order, and decides what a gap, a restart and a replay mean.

Theory of operation. An engine numbers its messages from 0. A number that follows the last one is applied. A higher one
shows that messages were lost: they are requested again from the replay endpoint, while new messages wait. A number that
goes back shows that the engine has restarted with an empty cache. If messages cannot be replayed, the engine's blocks
are forgotten, and the index continues with its estimate and with later events.

After each connection the messages from the last known one on are replayed, because subscribers miss the first messages
of a restarted engine. If the last known message is missing or differs, the engine has restarted. Without a replay
endpoint, events before the connection are unknown.

After ``MAX_FAILURES`` failed replays in a row there is none for ``PAUSE_S``. This class does no I/O: ``replay_from`` is
the replay to request, and ``event_stream.py`` calls the methods with what arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from enum import StrEnum
from math import inf
from time import time
from typing import Final

from xxhash import xxh3_64_intdigest

from routing.kv_events.decoding import MalformedEventsError, decode_batch, joined
from routing.kv_events.followed_engine import FollowedEngine

MAX_WAITING_BYTES: Final = 16 << 20  # of messages that wait for the end of a replay
MAX_FAILURES: Final = 3
PAUSE_S: Final = 30.0
MAX_LOSSES: Final = 5  # within ``LOSSES_S``: what is known is forgotten all the time, so nothing is known
LOSSES_S: Final = 30.0
MAX_MALFORMED: Final = 5  # in a row, on one connection: the engine is none whose events are understood


class StreamState(StrEnum):
    """What is known of an engine's blocks."""

    FOLLOWING = "following"  # all of them: every event since its start, or since its cache was cleared
    PARTIAL = "partial"  # every event since some time
    REPLAYING = "replaying"  # nothing for now: lost messages have been requested
    ESTIMATED = "estimated"  # nothing: there is no connection


class Snapshot(StrEnum):
    """What is known of the blocks that an engine stored before the connection."""

    COMPLETE = "complete"  # all of them: every message since its start, or since its cache was cleared
    PARTIAL = "partial"  # those of the messages that it could send again
    MISSING = "missing"  # none: there is no replay endpoint, or it did not respond


class MessageOrder:
    """The messages of one engine."""

    def __init__(
        self, engine: FollowedEngine, clock: Callable[[], float], *, can_replay: bool, rank: int | None = None
    ) -> None:
        self.engine = engine
        self._rank = rank  # data-parallel rank that the messages must be of; None: any
        self._state = StreamState.ESTIMATED
        self.since_s = time()  # Unix time since which the state is what it is
        self.replay_from: int | None = None  # number of the first message to request now; None: no request
        self.messages = 0  # published ones received, replayed ones not included
        self.events = 0
        self.gaps = 0
        self.lost = 0  # gaps that could not be replayed
        self.restarts = 0
        self.malformed = 0
        self._malformed_in_row, self._reason = 0, ""  # and why the latest of them was not decoded
        self.lag_s: float | None = None  # from the engine's time of the latest message to its arrival here
        self._least_lag_s = inf  # of the fastest message: its transfer time plus the difference of the clocks
        self._clock = clock
        self._can_replay = can_replay
        self._expected: int | None = None  # number of the next message; None: unknown
        self._latest_digest = 0  # of the last applied message's payload
        self._latest_live = -1  # number of the latest published message on this connection, replayed ones not included
        self._is_verified = True  # whether the engine is known to be the one of the earlier messages
        self._waiting: deque[tuple[int, bytes]] | None = None  # None: no replay is in progress
        self._waiting_bytes = 0
        self._has_replay = False  # whether the latest replay since the connection has ended
        self._failures = 0  # in a row
        self._pause_until_s = 0.0
        self._losses_s: deque[float] = deque(maxlen=MAX_LOSSES)  # on this connection

    @property
    def state(self) -> StreamState:
        """What is known of the engine's blocks."""
        return self._state

    @state.setter
    def state(self, state: StreamState) -> None:
        if state is not self._state:
            self._state, self.since_s = state, time()

    @property
    def is_followed(self) -> bool:
        """Whether events correct the residency index now."""
        return self.state in {StreamState.FOLLOWING, StreamState.PARTIAL}

    @property
    def snapshot(self) -> Snapshot | None:
        """What is known of earlier blocks; None while that is being requested, and without a connection."""
        if not self.is_followed:
            return None
        if self.engine.blocks.is_complete:
            return Snapshot.COMPLETE
        return Snapshot.PARTIAL if self._has_replay else Snapshot.MISSING

    @property
    def fault(self) -> str:
        """Why the stream is of no use, although there is a connection; "" if it is."""
        if len(self._losses_s) == MAX_LOSSES and self._clock() - self._losses_s[0] < LOSSES_S:
            return f"{MAX_LOSSES} gaps without a replay within {LOSSES_S:g} s"
        if self._malformed_in_row >= MAX_MALFORMED:
            return f"{MAX_MALFORMED} messages in a row are not as of vLLM 0.24 or later: {self._reason}"
        if self.is_followed and (served := self.engine.unreported):
            return f"no event for {served} responses with new blocks"
        return ""

    # --- connection ---

    def on_connected(self) -> None:
        """Called when a connection to the publisher was made."""
        self._latest_live, self._has_replay = -1, False
        self._losses_s.clear()
        self._malformed_in_row = 0
        self.engine.note_message()
        self._is_verified = self._expected is None
        if self._may_replay():
            self._start_replay()

    def on_disconnected(self) -> None:
        """Called when the connection was lost; the engine may have stopped."""
        self._end_replay()
        self.state = StreamState.ESTIMATED

    # --- messages ---

    def on_message(self, number: int, payload: bytes) -> Iterator[None]:
        """Apply a published message, or buffer it during a replay; yields after each event."""
        self.messages += 1
        self.engine.note_message()
        has_restarted = number <= self._latest_live
        self._latest_live = number
        if has_restarted:
            self._on_restarted()
            if self._may_replay():
                self._start_replay()
        if self._waiting is not None:
            yield from self._buffer(number, payload)
            return
        if not self._is_verified or self._expected is None:
            self._start_at(number)
        if number > (self._expected or 0):
            self.gaps += 1
            if self._may_replay():
                self._start_replay()
                yield from self._buffer(number, payload)
                return
            self._skip_lost(number)
        yield from self._apply(number, payload)

    def on_replayed(self, number: int, payload: bytes) -> Iterator[None]:
        """Apply a replayed message; yields after each event."""
        if self._waiting is None or self.replay_from is not None:  # it belongs to an earlier replay
            return
        expected = self._expected or 0
        if not self._is_verified:
            self._is_verified = True
            if number < expected and xxh3_64_intdigest(payload) != self._latest_digest:
                self._on_restarted()
                self._start_replay()
                return
            if number >= expected:  # the last known message is too old to be replayed
                self._skip_lost(number)
        if number > expected:
            self._skip_lost(number)
        elif number == expected == 0:
            self.engine.restart()
        yield from self._apply(number, payload)

    def on_replay_ended(self) -> Iterator[None]:
        """Called after the last replayed message: continue with the messages that waited."""
        if self._waiting is None or self.replay_from is not None:
            return
        if not self._is_verified:  # not even the last known message is there
            self._on_restarted()
            self._start_replay()
            return
        if self._expected is None:  # the engine has published nothing yet
            self._expected = 0
            self.engine.restart()
        waiting = self._waiting
        if waiting and waiting[0][0] > self._expected:  # published before the subscription, after the replay
            self._failures += 1
            if self._failures < MAX_FAILURES:
                self._start_replay()
            else:
                yield from self.on_replay_failed()
            return
        self._failures, self._has_replay = 0, True
        yield from self._continue()

    def on_replay_failed(self) -> Iterator[None]:
        """Called when the replay endpoint did not respond, or lacks messages."""
        if self._waiting is None:
            return
        self._failures, self._has_replay = self._failures + 1, False
        if self._failures >= MAX_FAILURES:
            self._failures, self._pause_until_s = 0, self._clock() + PAUSE_S
        self._skip_lost(self._waiting[0][0] if self._waiting else None)
        yield from self._continue()

    # --- steps ---

    def _may_replay(self) -> bool:
        return self._can_replay and self._clock() >= self._pause_until_s

    def _start_replay(self) -> None:
        self.state = StreamState.REPLAYING
        self._waiting = deque() if self._waiting is None else self._waiting
        first = self._expected or 0
        self.replay_from = first if self._is_verified else max(0, first - 1)

    def _end_replay(self) -> None:
        self._waiting, self._waiting_bytes, self.replay_from = None, 0, None

    def _continue(self) -> Iterator[None]:
        """End the replay and apply the messages that waited."""
        waiting = self._waiting or deque()
        self._end_replay()
        self._update_state()
        for number, payload in waiting:
            if number > (self._expected or 0):
                self._skip_lost(number)
            yield from self._apply(number, payload)

    def _buffer(self, number: int, payload: bytes) -> Iterator[None]:
        """Buffer a message until the replay ends; too many bytes end it."""
        if self._waiting is not None:
            self._waiting.append((number, payload))
        self._waiting_bytes += len(payload)
        if self._waiting_bytes > MAX_WAITING_BYTES:
            yield from self.on_replay_failed()

    def _on_restarted(self) -> None:
        """The engine has an empty cache and numbers its messages from 0 again."""
        self.restarts += 1
        self._expected, self._is_verified = 0, True
        if self._waiting is not None:
            self._waiting.clear()
            self._waiting_bytes = 0
        self.engine.restart()

    def _start_at(self, number: int) -> None:
        """Start at a message, without knowledge of earlier ones."""
        if self._expected is not None and number < self._expected:
            self._on_restarted()
        elif number == 0:
            self.engine.restart()
        if number:
            self._skip_to(number)
        self._expected, self._is_verified = number, True

    def _skip_lost(self, number: int | None) -> None:
        """Count a loss, and continue at this message (None: at the next one)."""
        self.lost += 1
        self._losses_s.append(self._clock())
        self._skip_to(number)

    def _skip_to(self, number: int | None) -> None:
        """Expect this message next (None: any), and forget the engine's blocks."""
        self._expected, self._is_verified = number, True
        self.engine.forget()

    def _apply(self, number: int, payload: bytes) -> Iterator[None]:
        """Apply a message, unless it was applied before."""
        if number < (self._expected or 0):
            return
        self._expected, self._latest_digest = number + 1, xxh3_64_intdigest(payload)
        try:
            batch = decode_batch(payload, self._rank)
        except MalformedEventsError as error:
            self.malformed += 1
            self._malformed_in_row, self._reason = self._malformed_in_row + 1, str(error)
            self.engine.forget()
        else:
            self._malformed_in_row = 0
            self.events += len(batch.events)
            yield from self.engine.apply(joined(batch.events), self._age_s(batch.at_s))
        self._update_state()

    def _age_s(self, at_s: float) -> float:
        """Seconds by which a message arrived later than the fastest one; independent of the clocks' difference."""
        lag_s = time() - at_s
        self.lag_s = max(0.0, lag_s)
        self._least_lag_s = min(self._least_lag_s, lag_s)
        return lag_s - self._least_lag_s

    def _update_state(self) -> None:
        if self._waiting is None:
            is_complete = self.engine.blocks.is_complete
            self.state = StreamState.FOLLOWING if is_complete else StreamState.PARTIAL
