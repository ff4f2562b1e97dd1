"""Finds out whether the engine of a silent replica works, by its ``/metrics`` counters and, in doubt, by a probe.

Theory of operation. An engine's API server responds to ``/metrics`` while the engine behind it hangs, with the values
of the engine's last step. Each step changes some of them (``routing/engines.py``): a prefill takes KV blocks chunk by
chunk, a decode counts tokens. Values that stay the same while requests are at the engine show that it takes no steps.
The API server's own values change without it, and are not read.

``stall_detection.py`` calls ``check`` while requests wait at a replica that sends no byte. All times are fractions of
the pool's ``stall_s`` (3 s). After a third of it in silence the counters are read, one read at a time. They are read
again after a third of it while they move, or a sixth while they stand still. If they stand still, or no response comes
for a third of ``stall_s``, a probe requests one streamed token from the engine, just in time for the limit.
Engines count it in their own metrics, so it is sent only where the engine may hang, is never cancelled while the
replica is configured, and is counted with its prompt tokens: readings of engines leave it out. Its token is progress
like a byte.

The engine hangs if all of this holds:

- the silence exceeds the limit of ``slowness.py``;
- the probe's token has not come for half of ``stall_s``;
- the counters stand still, or no response with counters came for all of ``stall_s``, because an overloaded API server
  may send them late.

An engine that rejects the probe (it requires a client's key, or generates no text) hangs if its counters stood still
for half of ``stall_s`` and report requests.

One probe is sent at a time. After each successful one the pause before the next doubles, up to ``MAX_PAUSE_S``, until
clients get bytes or the counters move by themselves.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Coroutine, Iterable
from enum import Enum
from typing import NamedTuple

from routing.engines import ENGINES
from routing.http.response_json import Usage
from routing.http.usage import ResponseTail, has_token, prompt_and_cached
from routing.log import defect
from routing.upstream.client import fetch
from routing.upstream.pool import Address

MAX_METRICS_BYTES = 4 << 20  # of one exposition; vLLM 0.32 sends 64 KB
PROBE_PATH = "/v1/completions"
MAX_PROBE_BYTES = 64 << 10  # of its response
TIMEOUT_RATIO = 2.0  # times ``stall_s``: time limit of a read or a probe
MAX_PAUSE_S = 60.0  # between successful probes


def _lines_of(metrics: Iterable[str], value: bytes) -> Callable[[bytes], list[bytes]]:
    names = b"|".join([re.escape(name).encode() for name in metrics])
    return re.compile(rb"^(?:" + names + rb")(?:\{[^}\n]*\})? " + value, re.MULTILINE).findall


_step_lines = _lines_of([name for engine in ENGINES for name in engine.step_metrics], rb"[^\s]+")
_requests = _lines_of([name for engine in ENGINES for name in engine.request_metrics], rb"([0-9.e+]+)")

logger = logging.getLogger(__name__)


class NoCounters(Enum):
    """Why there are no counters."""

    NO_RESPONSE = "no_response"  # or it came too late
    ABSENT = "absent"  # from the response: metrics are disabled, or it is another engine


class EngineCounters(NamedTuple):
    """One reading; two have the same ``lines`` if the engine took no step in between."""

    lines: tuple[bytes, ...]  # name, labels and value of each, as received
    requests: float  # running and waiting, as of the engine's last step


def parse_counters(text: bytes) -> EngineCounters | NoCounters:
    """The engine's counters in a Prometheus exposition. Linear in its length."""
    lines = tuple(_step_lines(text))
    if not lines:
        return NoCounters.ABSENT
    try:
        return EngineCounters(lines, sum(map(float, _requests(text))))
    except ValueError:
        return NoCounters.ABSENT


async def read_counters(address: Address, timeout_s: float) -> EngineCounters | NoCounters:
    """A replica's current counters, or why there are none. One GET; never raises."""
    try:
        async with asyncio.timeout(timeout_s):
            status, text = await fetch(address, "/metrics", max_bytes=MAX_METRICS_BYTES)
    except (TimeoutError, OSError):
        return NoCounters.NO_RESPONSE
    except ValueError:  # not HTTP, or a host name that the resolver rejects
        return NoCounters.ABSENT
    return parse_counters(text) if status == 200 else NoCounters.ABSENT


class ProbeResult(Enum):
    """Result of a probe."""

    PASSED = "passed"
    REJECTED = "rejected"  # by a status, which an API server may send without its engine
    NO_RESPONSE = "no_response"


class OwnRequests:
    """The requests of a router itself that engines completed (probes and warm-ups), which engines count like others."""

    def __init__(self) -> None:
        self.counts: dict[str, tuple[int, int, int]] = {}  # requests, prompt and cached tokens, by replica

    def add(self, replica: str, usage: Usage | None) -> None:
        """Count a request; tokens that the engine does not report count as 0."""
        requests, prompt, cached = self.counts.get(replica, (0, 0, 0))
        of_prompt, of_cache = (None, None) if usage is None else prompt_and_cached(usage)
        self.counts[replica] = requests + 1, prompt + (of_prompt or 0), cached + (of_cache or 0)


async def probe_engine(address: Address, model: str | None, timeout_s: float) -> tuple[ProbeResult, Usage | None]:
    """Let an engine generate one streamed token, with the replica's API key if it has one. Never raises.

    Returns the usage that it reports, too.
    """
    body: dict[str, object] = {"prompt": "Hi", "max_tokens": 1, "stream": True}
    body |= {"stream_options": {"include_usage": True}} | ({} if model is None else {"model": model})
    has_generated = False

    def has_ended(events: bytearray) -> bool:
        nonlocal has_generated
        has_generated = has_generated or has_token(events)
        return events.rstrip().endswith(b"data: [DONE]")

    try:
        async with asyncio.timeout(timeout_s):
            status, data = await fetch(
                address, PROBE_PATH, json.dumps(body).encode(), max_bytes=MAX_PROBE_BYTES, until=has_ended
            )
    except (TimeoutError, OSError, ValueError):
        return ProbeResult.PASSED if has_generated else ProbeResult.NO_RESPONSE, None
    if status != 200 or not has_token(data):
        return ProbeResult.REJECTED, None
    tail = ResponseTail()
    tail.add(data)
    return ProbeResult.PASSED, tail.usage()


class EngineCheck:
    """The check of one replica's engine. Times are the loop's."""

    def __init__(self, name: str, address: Address, own_requests: OwnRequests) -> None:
        self.name = name
        self.address = address
        self._own_requests = own_requests
        self.model: str | None = None  # model of a probe; None: the engine's default
        self.stall_s = 3.0  # setting of its pool
        self.probes = 0  # sent
        self.progress_at = 0.0  # when the engine last showed progress; 0: never
        self.has_counters: bool | None = None  # None: unknown
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._latest_counters: EngineCounters | NoCounters | None = None
        self._unchanged_since = 0.0  # first reading with the latest counters
        self._unchanged_until = 0.0  # last reading with them; 0: there was one only
        self._ended_standstill_s: float | None = None
        self._is_reading = False
        self._reading: asyncio.Task[None] | None = None
        self._reads_failing_since: float | None = None  # when the first read without a response was started
        self._next_read_at = 0.0
        self._is_probing = False
        self._no_response_since: float | None = None  # when the first probe without a response was sent
        self._was_rejected = False
        self._next_probe_at = 0.0
        self._passed_in_row = 0
        self._periods = 0  # that ended with progress; a probe of an earlier one tells nothing
        self._probe_callbacks: list[Callable[[ProbeResult], None]] = []

    def reset(self) -> None:
        """Clear all state, because clients get bytes."""
        if self._latest_counters is not None or self._tasks:
            self._periods += 1
            if self._reading is not None:
                self._reading.cancel()
            self._probe_callbacks.clear()
            self._is_probing = False
            self._forget_counters()
            self._passed_in_row, self._next_probe_at = 0, 0.0

    def check(self, silent_since: float, allowed_s: float, now: float) -> None:
        """Read the counters or send a probe if that is due.

        ``silent_since``: time of the latest progress. ``allowed_s``: the silence that shows a hang.
        """
        if isinstance(self._latest_counters, EngineCounters) and self._unchanged_since < silent_since:
            self._forget_counters()  # the counters were read in an earlier silence
        silence_s = now - silent_since
        if silence_s > self.stall_s / 3 and not self._is_reading and now >= self._next_read_at:
            self._is_reading = True
            if self._reads_failing_since is None:
                self._reads_failing_since = now
            self._reading = self._start(self._read())
        is_in_doubt = self._is_standing_still or self._reads_failing_s(now) >= self.stall_s / 3
        if silence_s >= allowed_s - self.stall_s / 2 and is_in_doubt and now >= self._next_probe_at:
            self.probe()

    def is_hung(self, silent_since: float, allowed_s: float, now: float) -> bool:
        """Whether the silence exceeds ``allowed_s`` and neither counters nor probe show progress."""
        if now - silent_since <= allowed_s or not (
            self._is_standing_still or self._reads_failing_s(now) >= self.stall_s
        ):
            return False
        if self._no_response_since is not None:
            return now - self._no_response_since >= self.stall_s / 2
        has_requests = isinstance(self._latest_counters, EngineCounters) and self._latest_counters.requests > 0
        return self._was_rejected and has_requests and self._standstill_s >= self.stall_s / 2

    def take_ended_standstill_s(self) -> float | None:
        """Seconds, at least, that the engine made no progress before it continued by itself.

        Each such period is returned once; None if there is no new one.
        """
        ended_s, self._ended_standstill_s = self._ended_standstill_s, None
        return ended_s

    def probe(self, on_probed: Callable[[ProbeResult], None] | None = None) -> None:
        """Send a probe unless one is in flight; ``on_probed`` gets the result."""
        if on_probed is not None:
            self._probe_callbacks.append(on_probed)
        if not self._is_probing:
            self._is_probing = True
            if self._no_response_since is None:
                self._no_response_since = self._loop.time()
            self._start(self._probe())

    def close(self) -> None:
        """Cancel reads and probes."""
        for task in self._tasks:
            task.cancel()
        self._probe_callbacks.clear()

    def _forget_counters(self) -> None:
        self._latest_counters = self._no_response_since = self._reads_failing_since = None
        self._unchanged_until, self._was_rejected = 0.0, False

    @property
    def _is_standing_still(self) -> bool:
        """Whether the latest readings show no progress, or there are no counters."""
        return self._latest_counters is NoCounters.ABSENT or self._unchanged_until > self._unchanged_since

    @property
    def _standstill_s(self) -> float:
        return self._unchanged_until - self._unchanged_since if self._unchanged_until else 0.0

    def _reads_failing_s(self, now: float) -> float:
        """For how many seconds reads have had no response."""
        return 0.0 if self._reads_failing_since is None else now - self._reads_failing_since

    async def _read(self) -> None:
        started_at = self._loop.time()
        try:
            reading = await read_counters(self.address, TIMEOUT_RATIO * self.stall_s)
        finally:
            self._is_reading = False
        if reading is NoCounters.NO_RESPONSE:
            self._next_read_at = self._loop.time() + self.stall_s / 6
            return
        self._reads_failing_since, self.has_counters = None, reading is not NoCounters.ABSENT
        has_progress = self._compare(reading, started_at, self._loop.time())
        self._next_read_at = started_at + self.stall_s / (3 if has_progress else 6)

    def _compare(self, reading: EngineCounters | NoCounters, started_at: float, now: float) -> bool:
        """Compare a reading with the one before; True if they show progress."""
        before, self._latest_counters = self._latest_counters, reading
        has_progress = False
        if isinstance(before, EngineCounters) and isinstance(reading, EngineCounters):
            if before.lines == reading.lines:
                self._unchanged_until = started_at
                return False
            has_progress = True
            self.progress_at = now
            self._ended_standstill_s = max(self._standstill_s, now - started_at)  # a late response is silence, too
            self._passed_in_row, self._next_probe_at = 0, 0.0
        self._unchanged_since, self._unchanged_until = now, 0.0
        return has_progress

    async def _probe(self) -> None:
        self.probes += 1
        period = self._periods
        try:
            result, usage = await probe_engine(self.address, self.model, TIMEOUT_RATIO * self.stall_s)
        finally:
            if period == self._periods:
                self._is_probing = False
        if result is ProbeResult.PASSED:
            self._own_requests.add(self.name, usage)
        if period != self._periods:
            return
        now = self._loop.time()
        if result is ProbeResult.NO_RESPONSE:
            self._next_probe_at = now + self.stall_s
        else:
            self._next_probe_at = now + min(MAX_PAUSE_S, self.stall_s * 2**self._passed_in_row)
            self._passed_in_row = min(self._passed_in_row + 1, 10)
            self._no_response_since = None
        if result is ProbeResult.PASSED:
            self.progress_at = now
            self._forget_counters()  # the probe itself moved the counters
        self._was_rejected = result is ProbeResult.REJECTED
        callbacks, self._probe_callbacks = self._probe_callbacks, []
        for on_probed in callbacks:
            on_probed(result)

    def _start(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            defect(logger, error, "engine check")
