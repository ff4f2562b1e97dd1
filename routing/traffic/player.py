"""Sends a workload to a router and totals the outcomes.

Theory of operation. One loop starts each job of the workload at its time. The loop waits while too many requests are in
flight and while the router cannot be reached (exponential back-off, 0.5 to 8 s). After a delay the rest of the schedule
moves by the same amount, so delayed requests are not sent in a burst. A turn of a session waits for the response to the
previous turn, which its prompt contains; if that request failed, the session ends and its remaining turns are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from routing.traffic.client import ChatClient, ChatResult, Totals, total
from routing.traffic.trace import Job, Script, Workload

MAX_LATE_S = 1.0  # a delay over this moves the schedule
BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
TURN_TIMEOUT_S = 300.0  # for the response to the previous turn

_encode = msgspec.json.encode


@dataclass(slots=True)
class Conversation:
    """Responses of one session so far."""

    responses: list[str] = field(default_factory=list)
    has_failed: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # set by each response or failure


@dataclass(slots=True)
class PlayConfig:
    """Options of the player."""

    model: str | None = None
    time_scale: float = 1.0  # 2 plays twice as fast
    requests: int | None = None  # stop after this many; None: at the end of the workload
    in_flight: int = 64


class Player:
    """Sends a workload's jobs and totals their outcomes."""

    def __init__(self, client: ChatClient, config: PlayConfig) -> None:
        self.totals: defaultdict[str, Totals] = defaultdict(Totals)  # by task group
        self.recent: defaultdict[str, Totals] = defaultdict(Totals)  # since the last summary
        self.skipped = 0
        self._client = client
        self._config = config
        self._slots = asyncio.Semaphore(config.in_flight)
        self._conversations: dict[Script, Conversation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = 0  # consecutive failures to connect
        self._delay_s = 0.0  # how late the whole schedule has become

    async def play(self, workload: Workload) -> None:
        """Start every job at its time and wait until all have ended."""
        started_s = time.monotonic()
        for job in self._limited_jobs(workload):
            due_s = started_s + job.at_s / self._config.time_scale
            await self._wait_until(due_s)
            await self._slots.acquire()
            late_s = time.monotonic() - due_s - self._delay_s
            if late_s > MAX_LATE_S:
                self._delay_s += late_s
            task = asyncio.create_task(self._run(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Cancel all requests in flight."""
        for task in self._tasks:
            task.cancel()

    def _limited_jobs(self, workload: Workload) -> Iterator[Job]:
        """The workload's jobs, at most as many as ``PlayConfig.requests`` allows."""
        left = self._config.requests
        for job in workload.jobs():
            if left is not None:
                if not left:
                    return
                left -= 1
            yield job

    async def _wait_until(self, due_s: float) -> None:
        """Sleep until the scheduled time, and for the back-off after failures to connect."""
        left_s = due_s + self._delay_s - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
        if self._failures:
            pause_s = BACK_OFF_S[min(self._failures, len(BACK_OFF_S)) - 1]
            self._delay_s += pause_s
            await asyncio.sleep(pause_s)

    async def _run(self, job: Job) -> None:
        try:
            conversation = self._conversations.setdefault(job.script, Conversation())
            if await self._await_earlier_turns(job, conversation):
                self._record(job, conversation, await self._send(job, conversation))
            else:
                self.skipped += 1
                conversation.has_failed = True
            conversation.changed.set()
            if job.is_last:
                self._conversations.pop(job.script, None)
        finally:
            self._slots.release()

    async def _await_earlier_turns(self, job: Job, conversation: Conversation) -> bool:
        """Wait for the responses that a job's prompt contains; False if the session failed or timed out."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TURN_TIMEOUT_S):
                while len(conversation.responses) < job.turn and not conversation.has_failed:
                    conversation.changed.clear()
                    await conversation.changed.wait()
        return len(conversation.responses) == job.turn and not conversation.has_failed

    async def _send(self, job: Job, conversation: Conversation) -> ChatResult:
        body = _encode(job.body(self._config.model, conversation.responses))
        headers = {"Content-Type": "application/json", "X-Task-Group": job.script.group}
        if job.script.session_id is not None:
            headers["X-Session-ID"] = job.script.session_id
        for totals in self._totals_of(job):
            totals.requests += 1
        return await self._client.send(body, headers)

    def _record(self, job: Job, conversation: Conversation, result: ChatResult) -> None:
        self._failures = self._failures + 1 if result.is_unreachable else 0
        conversation.responses.append(result.text)
        conversation.has_failed = result.error is not None
        for totals in self._totals_of(job):
            _count(totals, result)

    def _totals_of(self, job: Job) -> tuple[Totals, Totals]:
        group = job.script.group
        return self.totals[group], self.recent[group]

    def report(self, seconds: float) -> dict[str, Any]:
        """Totals of all requests and of each task group, as JSON."""
        return {
            "seconds": seconds,
            "skipped": self.skipped,
            **total(self.totals).report(),
            "groups": {name: totals.report() for name, totals in sorted(self.totals.items())},
        }


def _count(totals: Totals, result: ChatResult) -> None:
    if result.error is None:
        totals.ok += 1
    else:
        totals.errors[result.error] += 1
    if result.ttft_s is not None:
        totals.ttft.add(result.ttft_s)
    if result.usage is None:
        return
    totals.completion_tokens += result.usage.completion_tokens
    details = result.usage.prompt_tokens_details
    if details is not None and details.cached_tokens is not None:
        totals.usage_reported += 1
        totals.prompt_tokens += result.usage.prompt_tokens
        totals.cached_tokens += details.cached_tokens
