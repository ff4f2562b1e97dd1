"""Whether the engine of a silent replica works: its counters are read, and in doubt one token is asked for.

Theory of operation. ``stall_detection.py`` calls ``look`` while requests wait at a replica that sends no byte; a
replica that answers is never examined. All times are parts of the pool's ``stall_s`` (3 s). After a third of it in
silence the engine's counters are read, again after a third of it while they move and after a sixth while they stand
still: at most one read at a time. Counters that stand still, or do not come for a third of ``stall_s``, are a reason
for doubt: then one streamed token is asked for. An answer is progress like any other.

The engine hangs when the silence exceeds what ``stall_detection.py`` allows and the token has not come for half of
``stall_s``, while its counters stand still or did not come for all of ``stall_s``: an API server that has too much to
do may be late with them. An engine that rejects the probe (it asks for a client's key, or generates no text) hangs if
its counters stood still as long and say that requests are there.

Probes are rare and bounded: one at a time, and after each that was answered twice the pause of the one before, up to
``MAX_PAUSE_S``, until clients get bytes or the counters move by themselves.

The counters of a replica's ``/metrics`` that move with every step of its engine.

Theory of operation. vLLM's API server answers ``/metrics`` while the engine behind it hangs, with the figures of the
engine's last step. Each step changes some of these: a prefill takes KV blocks chunk by chunk and raises
``kv_cache_usage_perc``, a decode counts ``generation_tokens``. So figures that stay the same while requests are at the
engine show that it takes no steps. Only figures that the engine reports are read; the API server's own would move
without it. Names of vLLM 0.10 to 0.33.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Coroutine
from enum import Enum
from typing import NamedTuple

from routing.log import defect
from routing.upstream.client import fetch
from routing.upstream.pool import Address

PATH = "/metrics"
MAX_BYTES = 4 << 20  # of one exposition; vLLM 0.32 sends 64 KB

_STEP_FIGURES = (
    b"generation_tokens_total|prompt_tokens_total|iteration_tokens_total_count|iteration_tokens_total_sum|"
    b"prefix_cache_queries_total|gpu_prefix_cache_queries_total|kv_cache_usage_perc|gpu_cache_usage_perc|"
    b"num_preemptions_total|request_success_total"
)
_step_lines = re.compile(rb"^vllm:(?:" + _STEP_FIGURES + rb")(?:\{[^}\n]*\})? [^\s]+", re.MULTILINE).findall
_request_lines = re.compile(
    rb"^vllm:num_requests_(?:running|waiting)(?:\{[^}\n]*\})? ([0-9.e+]+)", re.MULTILINE
).findall


class NoCounters(Enum):
    """Why there are none."""

    UNANSWERED = "unanswered"  # nothing came, or not in time
    ABSENT = "absent"  # an answer that has none: metrics are disabled, or it is another engine


class EngineCounters(NamedTuple):
    """One reading; two have the same ``lines`` where the engine took no step in between."""

    lines: tuple[bytes, ...]  # name, labels and value of each, as they came
    requests: float  # running and waiting, as of the engine's last step


def parse_counters(text: bytes) -> EngineCounters | NoCounters:
    """The engine's figures in a Prometheus exposition. Linear in its length."""
    lines = tuple(_step_lines(text))
    requests = _request_lines(text)
    if not lines:
        return NoCounters.ABSENT
    try:
        return EngineCounters(lines, sum(map(float, requests)))
    except ValueError:
        return NoCounters.ABSENT


async def read_counters(address: Address, timeout_s: float) -> EngineCounters | NoCounters:
    """A replica's figures now, or why there are none. One GET; nothing is raised."""
    try:
        async with asyncio.timeout(timeout_s):
            status, text = await fetch(address, PATH, max_bytes=MAX_BYTES)
    except (TimeoutError, OSError):
        return NoCounters.UNANSWERED
    except ValueError:  # no HTTP, or a host that no resolver takes
        return NoCounters.ABSENT
    return parse_counters(text) if status == 200 else NoCounters.ABSENT


PROBE_PATH = "/v1/completions"
PROBE_BYTES = 64 << 10  # of its response
WAIT = 2.0  # times stall_s after which a read or a probe is over
MAX_PAUSE_S = 60.0  # between probes that are answered

logger = logging.getLogger(__name__)


class Probe(Enum):
    """How a probe ended."""

    ANSWERED = "answered"
    REJECTED = "rejected"  # by a status, which an API server may send without its engine
    UNANSWERED = "unanswered"


class EngineCheck:
    """One replica's."""

    def __init__(self, name: str, address: Address) -> None:
        self.name = name
        self.address = address
        self.model: str | None = None  # that a probe asks for; None: the engine's own
        self.stall_s = 3.0  # of its pool
        self.moved_at = 0.0  # when the engine last showed progress, in loop time; 0: never seen
        self.has_counters: bool | None = None  # None: not known
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._latest: EngineCounters | NoCounters | None = None
        self._still_since = 0.0  # since when the latest reading stands
        self._same_until = 0.0  # until when it was seen to
        self._stillness_s: float | None = None  # that has ended
        self._is_reading = False
        self._unread_since: float | None = None  # when the first read was begun that was not answered
        self._reads_at = 0.0  # the next time, at the soonest
        self._is_probing = False
        self._unanswered_since: float | None = None  # when the first probe was sent that was not answered
        self._was_rejected = False
        self._probes_at = 0.0  # the next time, at the soonest
        self._answered = 0  # probes in a row
        self._on_probed: list[Callable[[Probe], None]] = []

    def rest(self) -> None:
        """Clients get bytes: nothing is in doubt."""
        if self._latest is None and not self._tasks:
            return
        self.close()
        self._forget()
        self._answered, self._probes_at = 0, 0.0

    def look(self, silent_since: float, now: float) -> None:
        """Read the counters or send a probe if that is due. ``silent_since``: loop time of the latest progress."""
        if isinstance(self._latest, EngineCounters) and self._still_since < silent_since:
            self._forget()  # it was read in an earlier silence
        silence_s = now - silent_since
        if silence_s > self.stall_s / 3 and not self._is_reading and now >= self._reads_at:
            self._is_reading = True
            if self._unread_since is None:
                self._unread_since = now
            self._start(self._read())
        is_in_doubt = self._stands_still or self._unread_s(now) >= self.stall_s / 3
        if silence_s > self.stall_s / 2 and is_in_doubt and now >= self._probes_at:
            self.probe()

    def is_hung(self, silent_since: float, allowed_s: float, now: float) -> bool:
        """Whether the silence is longer than allowed and nothing that was asked of the engine came."""
        is_silent = self._stands_still or self._unread_s(now) >= self.stall_s
        if now - silent_since <= allowed_s or not is_silent:
            return False
        if self._unanswered_since is not None:
            return now - self._unanswered_since >= self.stall_s / 2
        stood_s = self._same_until - self._still_since
        has_requests = isinstance(self._latest, EngineCounters) and self._latest.requests > 0
        return self._was_rejected and has_requests and stood_s >= self.stall_s / 2

    def ended_stillness_s(self) -> float | None:
        """For how many seconds at least the engine stood still and then went on by itself; None if it did not. Once."""
        ended_s, self._stillness_s = self._stillness_s, None
        return ended_s

    def probe(self, on_probed: Callable[[Probe], None] | None = None) -> None:
        """Ask for one token, unless that is under way; ``on_probed`` hears how it ended."""
        if on_probed is not None:
            self._on_probed.append(on_probed)
        if not self._is_probing:
            self._is_probing = True
            if self._unanswered_since is None:
                self._unanswered_since = self._loop.time()
            self._start(self._probe())

    def close(self) -> None:
        """Ask nothing more."""
        for task in self._tasks:
            task.cancel()
        self._on_probed.clear()

    def _forget(self) -> None:
        self._latest = self._unanswered_since = self._unread_since = None
        self._same_until, self._was_rejected = 0.0, False

    @property
    def _stands_still(self) -> bool:
        """Whether the latest readings show no progress, or there are none to be had."""
        return self._latest is NoCounters.ABSENT or self._same_until > self._still_since

    def _unread_s(self, now: float) -> float:
        """For how many seconds the counters have not come that were asked for."""
        return 0.0 if self._unread_since is None else now - self._unread_since

    async def _read(self) -> None:
        began_at = self._loop.time()
        try:
            found = await read_counters(self.address, WAIT * self.stall_s)
        finally:
            self._is_reading = False
        if found is NoCounters.UNANSWERED:
            self._reads_at = self._loop.time() + self.stall_s / 6
            return
        self._unread_since, self.has_counters = None, found is not NoCounters.ABSENT
        is_news = self._take(found, began_at, self._loop.time())
        self._reads_at = began_at + self.stall_s / (3 if is_news else 6)

    def _take(self, found: EngineCounters | NoCounters, began_at: float, now: float) -> bool:
        """Compare a reading with the one before; True if they show progress."""
        before, self._latest = self._latest, found
        has_moved = False
        if isinstance(before, EngineCounters) and isinstance(found, EngineCounters):
            if before.lines == found.lines:
                self._same_until = began_at
                return False
            has_moved = True
            self.moved_at = now
            stood_s = self._same_until - self._still_since if self._same_until else 0.0
            self._stillness_s = max(stood_s, now - began_at)  # a late answer is a silence as well
            self._answered, self._probes_at = 0, 0.0
        self._still_since, self._same_until = now, 0.0
        return has_moved

    async def _probe(self) -> None:
        ended = Probe.UNANSWERED
        try:
            ended = await ask_for_a_token(self.address, self.model, WAIT * self.stall_s)
        finally:
            self._is_probing = False
        now = self._loop.time()
        if ended is Probe.UNANSWERED:
            self._probes_at = now + self.stall_s
        else:
            self._probes_at = now + min(MAX_PAUSE_S, self.stall_s * 2**self._answered)
            self._answered = min(self._answered + 1, 10)
            self._unanswered_since = None
        if ended is Probe.ANSWERED:
            self.moved_at = now
            self._forget()  # the probe itself moved the counters
        self._was_rejected = ended is Probe.REJECTED
        waiting, self._on_probed = self._on_probed, []
        for on_probed in waiting:
            on_probed(ended)

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            defect(logger, error, "engine check")


async def ask_for_a_token(address: Address, model: str | None, timeout_s: float) -> Probe:
    """Have an engine generate one streamed token. With the replica's own key, where it has one; nothing is raised."""
    body = {"prompt": "Hi", "max_tokens": 1, "stream": True} | ({} if model is None else {"model": model})
    try:
        async with asyncio.timeout(timeout_s):
            status, data = await fetch(
                address, PROBE_PATH, json.dumps(body).encode(), max_bytes=PROBE_BYTES, only_first_byte=True
            )
    except (TimeoutError, OSError, ValueError):
        return Probe.UNANSWERED
    return Probe.ANSWERED if status == 200 and data else Probe.REJECTED
