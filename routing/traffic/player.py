"""Play a workload through a router, and tally what a client sees.

Theory of operation. One loop takes the workload's jobs in order and starts each at its time. Three things make it
wait: too many requests in flight, a router that cannot be reached (back-off, half a second doubling to 8), and its
own lateness. Whenever it has waited, the whole schedule moves by as much: what was missed is never sent in a burst.
A session's turn waits for the answer to the turn before, which is part of its prompt; if that one failed, the
session ends there and the turns left are counted as skipped.
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

from routing.traffic.client import ChatClient, ChatResult, Tally, total
from routing.traffic.trace import Job, Script, Workload

LATE_S = 1.0  # behind its schedule by more than this, a player moves the schedule
BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
LONGEST_WAIT_S = 300.0  # for the answer to the turn before

_encode = msgspec.json.encode


@dataclass(slots=True)
class Conversation:
    """A session's answers so far."""

    answers: list[str] = field(default_factory=list)
    is_broken: bool = False
    turned: asyncio.Event = field(default_factory=asyncio.Event)  # set at each answer or failure


@dataclass(slots=True)
class PlayConfig:
    """How a workload is played."""

    model: str | None = None
    time_scale: float = 1.0  # 2 plays twice as fast
    requests: int | None = None  # stop after so many; None: when the workload ends
    in_flight: int = 64


class Player:
    """Sends a workload's jobs and tallies what comes back."""

    def __init__(self, client: ChatClient, config: PlayConfig) -> None:
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self.recent: defaultdict[str, Tally] = defaultdict(Tally)  # since the last summary
        self.skipped = 0
        self._client = client
        self._config = config
        self._slots = asyncio.Semaphore(config.in_flight)
        self._conversations: dict[Script, Conversation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = 0  # to reach the router, in a row
        self._moved_s = 0.0  # by how much the schedule has moved

    async def play(self, workload: Workload) -> None:
        """Start every job at its time and wait for the last answers."""
        started_s = time.monotonic()
        for job in self._limited(workload):
            due_s = started_s + job.at_s / self._config.time_scale
            await self._wait_until(due_s)
            await self._slots.acquire()
            late_s = time.monotonic() - due_s - self._moved_s
            if late_s > LATE_S:
                self._moved_s += late_s
            task = asyncio.create_task(self._run(job))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        while self._tasks:
            await asyncio.wait(self._tasks)

    def cancel(self) -> None:
        """Drop what is in flight."""
        for task in self._tasks:
            task.cancel()

    def _limited(self, workload: Workload) -> Iterator[Job]:
        left = self._config.requests
        for job in workload.jobs():
            if left is not None:
                if not left:
                    return
                left -= 1
            yield job

    async def _wait_until(self, due_s: float) -> None:
        """Sleep until a moment of the schedule, and through any back-off."""
        left_s = due_s + self._moved_s - time.monotonic()
        if left_s > 0:
            await asyncio.sleep(left_s)
        if self._failures:
            pause_s = BACK_OFF_S[min(self._failures, len(BACK_OFF_S)) - 1]
            self._moved_s += pause_s
            await asyncio.sleep(pause_s)

    async def _run(self, job: Job) -> None:
        """One job, from waiting for its turn to its tally."""
        try:
            conversation = self._conversations.setdefault(job.script, Conversation())
            if await self._is_turn(job, conversation):
                self._take(job, conversation, await self._send(job, conversation))
            else:
                self.skipped += 1
                conversation.is_broken = True
            conversation.turned.set()
            if job.is_last:
                self._conversations.pop(job.script, None)
        finally:
            self._slots.release()

    async def _is_turn(self, job: Job, conversation: Conversation) -> bool:
        """Wait for the answers that a job's prompt contains; False if they will not come."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LONGEST_WAIT_S):
                while len(conversation.answers) < job.turn and not conversation.is_broken:
                    conversation.turned.clear()
                    await conversation.turned.wait()
        return len(conversation.answers) == job.turn and not conversation.is_broken

    async def _send(self, job: Job, conversation: Conversation) -> ChatResult:
        body = _encode(job.body(self._config.model, conversation.answers))
        headers = {"Content-Type": "application/json", "X-Task-Group": job.script.group}
        if job.script.session_id is not None:
            headers["X-Session-ID"] = job.script.session_id
        for tally in self._tallies_of(job):
            tally.requests += 1
        return await self._client.send(body, headers)

    def _take(self, job: Job, conversation: Conversation, seen: ChatResult) -> None:
        self._failures = self._failures + 1 if seen.is_unreachable else 0
        conversation.answers.append(seen.text)
        conversation.is_broken = seen.error is not None
        for tally in self._tallies_of(job):
            _count(tally, seen)

    def _tallies_of(self, job: Job) -> tuple[Tally, Tally]:
        group = job.script.group
        return self.tallies[group], self.recent[group]

    def report(self, seconds: float) -> dict[str, Any]:
        """All figures as JSON, the groups' beside those of all."""
        return {
            "seconds": seconds,
            "skipped": self.skipped,
            **total(self.tallies).report(),
            "groups": {name: tally.report() for name, tally in sorted(self.tallies.items())},
        }


def _count(tally: Tally, seen: ChatResult) -> None:
    if seen.error is None:
        tally.ok += 1
    else:
        tally.errors[seen.error] += 1
    if seen.ttft_s is not None:
        tally.ttft.add(seen.ttft_s)
    if seen.usage is None:
        return
    tally.completion_tokens += seen.usage.completion_tokens
    details = seen.usage.prompt_tokens_details
    if details is not None and details.cached_tokens is not None:
        tally.usage_reported += 1
        tally.prompt_tokens += seen.usage.prompt_tokens
        tally.cached_tokens += details.cached_tokens
