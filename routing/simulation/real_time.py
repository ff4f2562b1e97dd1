"""The engine model in real time: one timer on an event loop, however many sequences run.

Theory of operation. At most one step is in progress. When its end has come the timer takes its tokens, tells the
listeners and plans the next step from the moment the last one *should* have ended: a late timer (a busy core) does
not slow the modelled engine, it catches up, unless it is so late that the machine must have stood still. Paused
(asleep or hung), no step begins or ends and the gauges keep what they showed.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from routing.simulation.engine import Engine, Step
from routing.simulation.sequence import Sequence, State

TIMER_S = 0.001  # a loop's timers may fire this much early; asking for a little later keeps them from spinning
STANDSTILL_S = 2.0  # a timer this late means the process did not run at all


class Listener(Protocol):
    """Who hears of a sequence's progress, from inside the timer: be quick, do not raise."""

    def advance(self, generated_tokens: int, finish_reason: str | None) -> None:
        """It has this many tokens now, and a reason if those are all. ``abort`` may bring no new token."""
        ...


class RealTimeEngine:
    """An engine and the loop that drives it. Times are the loop's."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.is_paused = False
        self._loop = loop
        self._listeners: dict[Sequence, Listener] = {}
        self._step: Step | None = None
        self._timer: asyncio.TimerHandle | None = None

    def now(self) -> float:
        """The loop's time, seconds."""
        return self._loop.time()

    def submit(self, sequence: Sequence, listener: Listener) -> None:
        """Queue a sequence; TooLongError if it can never run."""
        self.engine.submit(sequence)
        self._listeners[sequence] = listener
        if self._step is None and not self.is_paused:
            # one loop iteration later, so that requests which arrived together share their first step
            self._loop.call_soon(self._wake)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence whose client has disconnected; nothing happens if it has ended or was never submitted."""
        if self._listeners.pop(sequence, None) is None:
            return
        self.engine.abort(sequence)
        if not self.is_paused:
            self.engine.read_gauges()

    def pause(self) -> None:
        """Stand still: what runs stays, what comes waits."""
        self.is_paused = True
        self._cancel_timer()

    def resume(self) -> None:
        """Go on; a step cut short ends now."""
        self.is_paused = False
        self._cancel_timer()
        if self._step is not None:
            self._step.end_s = self.now()
        self._tick()

    def stop(self) -> None:
        """End every sequence with "abort" and take no further step."""
        self._cancel_timer()
        self.is_paused = True
        stopped = self.engine.stop_all(self.now())
        for sequence in stopped:
            listener = self._listeners.pop(sequence, None)
            if listener is not None:
                listener.advance(sequence.generated_tokens, "abort")

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._step is None and not self.is_paused:
            self._begin(self.now())

    def _begin(self, at_s: float) -> None:
        self._step = self.engine.begin(at_s)
        if self._step is not None:
            self._timer = self._loop.call_at(self._step.end_s + TIMER_S, self._tick)

    def _tick(self) -> None:
        """Take every step that should have ended by now."""
        now_s = self.now()
        while not self.is_paused and self._step is not None and self._step.end_s <= now_s:
            step = self._step
            self._take(step)
            at_s = step.end_s if now_s - step.end_s < STANDSTILL_S else now_s
            self._step = self.engine.begin(at_s)
        if self.is_paused:
            return
        if self._step is None:
            self._begin(now_s)
        else:
            self._timer = self._loop.call_at(self._step.end_s + TIMER_S, self._tick)

    def _take(self, step: Step) -> None:
        """Take a step's tokens and tell the listeners."""
        decoding = list(self.engine.decoding)
        outcome = self.engine.finish(step)
        for sequence in (*decoding, *outcome.first):
            if sequence.state is State.FINISHED:
                listener = self._listeners.pop(sequence)
                listener.advance(sequence.generated_tokens, sequence.finish_reason)
            else:
                self._listeners[sequence].advance(self.engine.generated(sequence), None)
