"""Play a trace or the mix through a router: ``python -m routing play --router URL (--trace FILE | --mix SEED)``.

Theory of operation. One loop takes the workload's jobs in order and starts each at its time. Three things make it
wait: too many requests in flight, a router that cannot be reached (back-off, half a second doubling to 8), and its
own lateness. Whenever it has waited, the whole schedule moves by as much: what was missed is never sent in a burst.
A session's turn waits for the answer to the turn before, which is part of its prompt; if that one failed, the
session ends there and the turns left are counted as skipped.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import uvloop

from routing.workload.client import ChatClient, Seen
from routing.workload.job import Job, Script, Workload
from routing.workload.mix import DEFAULT_RATE, Mix
from routing.workload.prompts import TraceWorkload
from routing.workload.tally import Tally, one_line, total
from routing.workload.trace import TraceError, read_trace

LATE_S = 1.0  # behind its schedule by more than this, a player moves the schedule
BACK_OFF_S = (0.5, 1.0, 2.0, 4.0, 8.0)
SUMMARY_S = 10.0
ANSWER_TIMEOUT_S = 600.0
SILENCE_TIMEOUT_S = 120.0
LONGEST_WAIT_S = 300.0  # for the answer to the turn before

_encode = msgspec.json.encode


@dataclass(slots=True)
class Conversation:
    """A session's answers so far."""

    answers: list[str] = field(default_factory=list)
    is_broken: bool = False
    turned: asyncio.Event = field(default_factory=asyncio.Event)  # set at each answer or failure


@dataclass(slots=True)
class Limits:
    """How a workload is played."""

    model: str | None = None
    time_scale: float = 1.0  # 2 plays twice as fast
    requests: int | None = None  # stop after so many; None: when the workload ends
    in_flight: int = 64


class Player:
    """Sends a workload's jobs and tallies what comes back."""

    def __init__(self, client: ChatClient, limits: Limits) -> None:
        self.tallies: defaultdict[str, Tally] = defaultdict(Tally)
        self.recent: defaultdict[str, Tally] = defaultdict(Tally)  # since the last summary
        self.skipped = 0
        self._client = client
        self._limits = limits
        self._slots = asyncio.Semaphore(limits.in_flight)
        self._conversations: dict[Script, Conversation] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures = 0  # to reach the router, in a row
        self._moved_s = 0.0  # by how much the schedule has moved

    async def play(self, workload: Workload) -> None:
        """Start every job at its time and wait for the last answers."""
        started_s = time.monotonic()
        for job in self._limited(workload):
            due_s = started_s + job.at_s / self._limits.time_scale
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
        left = self._limits.requests
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

    async def _send(self, job: Job, conversation: Conversation) -> Seen:
        body = _encode(job.body(self._limits.model, conversation.answers))
        headers = {"Content-Type": "application/json", "X-Task-Group": job.script.group}
        if job.script.session_id is not None:
            headers["X-Session-ID"] = job.script.session_id
        for tally in self._tallies_of(job):
            tally.requests += 1
        return await self._client.send(body, headers)

    def _take(self, job: Job, conversation: Conversation, seen: Seen) -> None:
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


def _count(tally: Tally, seen: Seen) -> None:
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


# --- command line ------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m routing play", description="Play traffic through a router.")
    add = parser.add_argument
    add("--router", required=True, metavar="URL", help="base URL of the router's data port")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, help="a trace in Mooncake's format, .jsonl or .jsonl.gz")
    source.add_argument("--mix", type=int, metavar="SEED", help="the generated mix; it has no end")
    add("--time-scale", type=float, default=1.0, help="2 plays twice as fast (default %(default)s)")
    add("--rate", type=float, help=f"requests/s: of the mix (default {DEFAULT_RATE:g}); of a trace, sets --time-scale")
    add("--tokens-per-s", type=float, metavar="R", help="prompt tokens/s of a trace; sets --time-scale")
    add("--loop", action="store_true", help="begin a trace again when it ends")
    add("--requests", type=int, help="stop after so many")
    add("--model", help="the model's name (default: whichever the router serves)")
    add("--in-flight", type=int, default=64, help="requests at once (default %(default)s)")
    add("--report", type=Path, metavar="FILE", help="write the final report there")
    return parser


def _workload(given: argparse.Namespace) -> tuple[Workload, float]:
    """The workload asked for, and its time scale."""
    if given.trace is None:
        return Mix(given.mix, given.rate or DEFAULT_RATE), given.time_scale
    requests = read_trace(given.trace)
    scale = given.time_scale
    lasts_s = requests[-1].at_s if len(requests) > 1 else 0.0
    if given.rate and lasts_s:
        scale = given.rate * lasts_s / len(requests)
    elif given.tokens_per_s and lasts_s:
        scale = given.tokens_per_s * lasts_s / sum(request.prompt_tokens for request in requests)
    return TraceWorkload(requests, given.loop), scale


async def _summaries(player: Player) -> None:
    """A line every ten seconds, of those ten seconds."""
    while True:
        await asyncio.sleep(SUMMARY_S)
        recent = total(player.recent)
        player.recent.clear()
        print(one_line(recent, SUMMARY_S), flush=True)  # noqa: T201


async def _play(given: argparse.Namespace, workload: Workload, scale: float) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S, sock_connect=5.0, sock_read=SILENCE_TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    limits = Limits(given.model, scale, given.requests, given.in_flight)
    started = datetime.now(UTC)
    began_s = time.monotonic()
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        player = Player(ChatClient(http, f"{given.router.rstrip('/')}/v1/chat/completions"), limits)
        playing = asyncio.create_task(player.play(workload))
        summaries = asyncio.create_task(_summaries(player))
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, playing.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await playing
        summaries.cancel()
        player.cancel()
        await asyncio.gather(summaries, return_exceptions=True)
        seconds = time.monotonic() - began_s
        return {"started_at": started.isoformat(), **player.report(seconds)}


def main(argv: Sequence[str] | None = None) -> int:
    """Play until the workload ends or SIGTERM; 0, or 2 where the trace cannot be read."""
    parser = _parser()
    given = parser.parse_args(argv)
    for name in ("time_scale", "rate", "tokens_per_s", "in_flight", "requests"):
        number = getattr(given, name)
        if number is not None and not 0 < number < math.inf:
            parser.error(f"--{name.replace('_', '-')}: expected a finite number above 0")
    try:
        workload, scale = _workload(given)
    except (OSError, TraceError) as error:
        print(f"cannot read the trace: {error}", file=sys.stderr)  # noqa: T201
        return 2
    report = json.dumps(uvloop.run(_play(given, workload, scale)), indent=1)
    if given.report is not None:
        given.report.write_text(f"{report}\n")
    else:
        print(report, flush=True)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
