"""Runs a modelled engine in real time on an event loop, with one timer for all its sequences.

Theory of operation. At most one step is in progress. When it ends, the timer takes its tokens, calls the listeners and
plans the next step from the moment the last one *should* have ended: a late timer (a busy core) does not slow the
modelled engine, it catches up, unless the timer is so late that the whole machine must have been suspended. While the
engine is paused (hung), no step begins or ends and the gauges keep their values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from routing.simulation.engine import Engine, Sequence, State, Step

TIMER_S = 0.001  # a loop's timers may fire this much early; a slightly later deadline keeps them from spinning
SUSPENDED_S = 2.0  # a timer this late means that the process did not run at all

# Called with the tokens generated so far, and the finish reason if they are all; from inside the timer, so it must be
# quick and not raise. ``abort`` may bring no new token.
Listener = Callable[[int, str | None], None]


class RealTimeEngine:
    """An engine and the timer that drives it. Times are the loop's."""

    def __init__(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        self.engine = engine
        self.is_paused = False
        self._loop = loop
        self._listeners: dict[Sequence, Listener] = {}
        self._step: Step | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.on_planned: Callable[[], None] | None = None  # called after each step was planned

    def now(self) -> float:
        """The loop's time, seconds."""
        return self._loop.time()

    def submit(self, sequence: Sequence, listener: Listener) -> None:
        """Queue a sequence."""
        self.engine.submit(sequence)
        self._listeners[sequence] = listener
        if self._step is None and not self.is_paused:
            # one loop iteration later, so that requests which arrived together share their first step
            self._loop.call_soon(self._tick)

    def abort(self, sequence: Sequence) -> None:
        """Drop a sequence whose client has disconnected; no effect if it has ended or was never submitted."""
        if self._listeners.pop(sequence, None) is not None:
            self.engine.abort(sequence)
            if not self.is_paused:
                self.engine.update_gauges()

    def pause(self) -> None:
        """Take no further step; sequences stay and new ones wait."""
        self.is_paused = True
        self._cancel_timer()

    def resume(self) -> None:
        """Continue; an interrupted step ends now."""
        self.is_paused = False
        if self._step is not None:
            self._step.end_s = self.now()
        self._tick()

    def stop(self) -> None:
        """End every sequence with "abort" and take no further step."""
        self.pause()
        for sequence in self.engine.stop_all(self.now()):
            listener = self._listeners.pop(sequence, None)
            if listener is not None:
                listener(sequence.generated_tokens, "abort")

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tick(self) -> None:
        """Take every step that should have ended by now, and plan the next."""
        self._cancel_timer()
        now_s = at_s = self.now()
        while not self.is_paused:
            if self._step is None:
                self._step = self.engine.plan_step(at_s)
                if self.on_planned is not None:
                    self.on_planned()
            if self._step is None:
                return
            if self._step.end_s > now_s:
                self._timer = self._loop.call_at(self._step.end_s + TIMER_S, self._tick)
                return
            step, self._step = self._step, None
            self._finish(step)
            at_s = step.end_s if now_s - step.end_s < SUSPENDED_S else now_s

    def _finish(self, step: Step) -> None:
        decoding = list(self.engine.decoding)
        result = self.engine.finish(step)
        for sequence in (*decoding, *result.first):
            if sequence.state is State.FINISHED:
                self._listeners.pop(sequence)(sequence.generated_tokens, sequence.finish_reason)
            else:
                self._listeners[sequence](sequence.generated_tokens, None)
