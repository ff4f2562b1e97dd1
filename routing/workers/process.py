"""One worker process as its parent sees it, and the polling of all workers.

Theory of operation. Every worker is polled about once a second, and for each request for metrics. A worker that
misses one of the periodic polls is silent: another one then accepts from its sockets as well, so that no new client
waits for a hung worker. When it responds again it has them to itself; after ``MAX_MISSED_POLLS`` in a row it is killed.
Polls are counted instead of seconds, because after a suspension of the machine every worker would seem silent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from routing.http.response import RejectedRequestError
from routing.log import event
from routing.response_cache.memory import PURGE_S, StorePurge
from routing.schema import CachePurge
from routing.workers.messages import (
    CallRejectedError,
    Channel,
    ChannelClosedError,
    Preparation,
    WorkerOptions,
    WorkerStatus,
    as_plain,
)
from routing.workers.metrics import Families, parse
from routing.workers.sequence import DecisionSequence, RetainedDecisions

START_S = 30.0  # timeout of a worker's start
CALL_S = 10.0  # timeout of other calls
FORGET_S = 2.0  # timeout of removing entries from the memory of one worker
PREPARE_S = 15.0  # a configuration of a thousand replicas takes a second
END_S = 5.0  # timeout of an idle worker's end
_CHUNK = 1000  # decisions read at a time

UNREACHABLE = (ChannelClosedError, TimeoutError)

logger = logging.getLogger(__name__)


class WorkerProcess:
    """A process and the channel to it. It is a ``DecisionSource``."""

    def __init__(self, options: WorkerOptions, process: asyncio.subprocess.Process, channel: Channel) -> None:
        self.number = options.number
        self.row = options.row
        self.process = process
        self.channel = channel
        self.has_started = False  # responds to calls
        self.is_ready = False  # has the configuration, if there is one, and may accept
        self.listening: list[int] = []  # slots that it accepts from
        self.metrics: Families = {}
        self.replica_rows: list[dict[str, Any]] = []
        self.in_flight = 0
        self.first, self.last = 1, 0  # numbers of its oldest and newest decision
        self.numbered = 0  # the last of them that has a number in the sequence
        self.missed_polls = 0  # in a row
        self._running = asyncio.create_task(channel.run())

    @classmethod
    async def start(cls, options: WorkerOptions, end: socket.socket, inherited: Sequence[int]) -> WorkerProcess:
        """Start a process; OSError if that fails."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "routing.workers.worker",
            msgspec.json.encode(options).decode(),
            pass_fds=inherited,
            start_new_session=True,  # a terminal's Ctrl-C goes to the parent only
        )
        return cls(options, process, await Channel.open(end, _reject_call))

    @property
    def is_silent(self) -> bool:
        """Whether the worker missed the last periodic poll."""
        return self.missed_polls > 0

    async def wait_until_started(self) -> None:
        """Wait until the worker responds."""
        await self.poll(timeout_s=START_S)
        self.has_started = True

    async def poll(self, *, timeout_s: float = CALL_S) -> None:
        """Read the worker's state."""
        status = msgspec.convert(await self.channel.call("poll", timeout_s=timeout_s), WorkerStatus)
        self.metrics = parse(status.metrics)
        self.replica_rows, self.in_flight = status.replicas, status.in_flight
        self.first, self.last = status.first_decision, max(self.last, status.last_decision)

    async def prepare(self, preparation: Preparation) -> None:
        """Make the worker prepare a configuration."""
        await self.channel.call("prepare", as_plain(preparation), timeout_s=PREPARE_S)

    async def commit(self) -> None:
        """Make the worker activate the prepared configuration."""
        await self.channel.call("commit", timeout_s=CALL_S)

    async def listen(self, slots: list[int]) -> None:
        """Make the worker accept from the sockets of these slots only."""
        if slots != self.listening:
            self.listening = slots
            await self.channel.call("listen", slots, timeout_s=CALL_S)

    async def explain(self, request: bytes) -> dict[str, Any]:
        """The decision that a request would get from this worker."""
        try:
            explanation: dict[str, Any] = await self.channel.call("explain", request, timeout_s=CALL_S)
        except CallRejectedError as error:
            status, message = error.facts.get("status", 500), error.facts.get("message", "internal error")
            raise RejectedRequestError(status, message) from None
        return explanation

    async def forget_responses(self, purge: CachePurge) -> int:
        """Make the worker remove entries of response caches from its memory; their number, 0 if it has exited."""
        with suppress(ChannelClosedError):
            entries: int = await self.channel.call("forget_responses", msgspec.to_builtins(purge), timeout_s=FORGET_S)
            return entries
        return 0

    async def purge_store(self, purge: CachePurge) -> StorePurge | None:
        """Make the worker remove entries of response caches from the store; None without a store.

        The worker stops after ``PURGE_S`` and says how far it came, for which ``FORGET_S`` more is left.
        """
        purged = await self.channel.call("purge_store", msgspec.to_builtins(purge), timeout_s=PURGE_S + FORGET_S)
        return None if purged is None else StorePurge(*purged)

    async def read(self, first: int, last: int, ratio: float = 1.0) -> list[dict[str, Any]]:
        """The worker's decisions ``first`` to ``last``; fewer if the worker became unreachable."""
        rows: list[dict[str, Any]] = []
        with suppress(*UNREACHABLE, CallRejectedError):
            while first <= last:
                page = await self.channel.call("decisions", [first, last, ratio], timeout_s=CALL_S)
                if not page:
                    break
                rows += page
                first = page[-1]["seq"] + 1
        return rows

    async def stop_accepting(self) -> None:
        """Make the worker close its listening sockets."""
        self.listening = []
        await self.channel.call("stop_accepting", timeout_s=CALL_S)

    async def drain(self, linger_s: float, *, timeout_s: float) -> None:
        """Make the worker stop accepting, wait until it is idle, and read its final state."""
        with suppress(*UNREACHABLE, CallRejectedError):
            await self.channel.call("drain", linger_s, timeout_s=timeout_s)
            await self.poll()

    async def retained_decisions(self) -> RetainedDecisions:
        """A copy of the worker's decisions, to be read after the worker has exited."""
        rows: list[dict[str, Any]] = []
        for first in range(self.first, self.last + 1, _CHUNK):
            rows += await self.read(first, min(first + _CHUNK - 1, self.last))
        return RetainedDecisions(rows)

    async def end(self) -> None:
        """Close the channel, which ends an idle worker; kill the worker if that takes too long."""
        self.channel.close()
        try:
            async with asyncio.timeout(END_S):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()
        self._running.cancel()

    def kill(self) -> None:
        """Send SIGKILL."""
        with suppress(ProcessLookupError):
            self.process.kill()


async def _reject_call(method: str, _: Any) -> None:
    raise CallRejectedError(reason=f"the parent has no method {method}")


async def run_or_kill(worker: WorkerProcess, command: Callable[[], Awaitable[None]]) -> None:
    """Run a command in a worker, or kill the worker if that fails; its successor starts with the present state."""
    try:
        await command()
    except (*UNREACHABLE, CallRejectedError) as error:
        event(logger, "worker_failed", level=logging.ERROR, worker=worker.number, reason=repr(error))
        worker.kill()


POLL_S = 1.0  # between polls; what a worker counted since the last one is lost if it is killed
MAX_POLL_S = 5.0  # the same if polling takes long
POLL_SHARE = 0.02  # maximum share of the time for polling, which takes 60 ms per worker with 1,000 replicas
POLL_TIMEOUT_S = 3.0
MAX_MISSED_POLLS = 8  # half a minute


class WorkerPoller:
    """Polls all workers of a router. ``on_silence_changed`` is called when one becomes silent or responds again."""

    def __init__(
        self,
        processes: Callable[[], list[WorkerProcess]],
        sequence: DecisionSequence,
        on_silence_changed: Callable[[], Awaitable[None]],
    ) -> None:
        self._processes = processes
        self._sequence = sequence
        self._on_silence_changed = on_silence_changed

    async def poll_forever(self) -> None:
        """Poll at intervals."""
        duration_s = 0.0
        while True:
            await asyncio.sleep(pause_after(duration_s))
            duration_s = max(await asyncio.gather(*map(self._check, self._processes())), default=0.0)

    async def poll(self, timeout_s: float) -> None:
        """Poll all workers that are not silent; those that take longer keep their last state."""
        await asyncio.gather(*(self._poll(worker, timeout_s) for worker in self._processes() if not worker.is_silent))

    def add_decisions(self, worker: WorkerProcess) -> None:
        """Number a worker's new decisions."""
        self._sequence.add(worker, worker.numbered)
        worker.numbered = worker.last

    async def _check(self, worker: WorkerProcess) -> float:
        """Poll, and update whether the worker is silent; seconds until the response, 0 without one."""
        time, was_silent = asyncio.get_running_loop().time, worker.is_silent
        started_at = time()
        responded = await self._poll(worker, POLL_TIMEOUT_S)
        duration_s = time() - started_at if responded else 0.0
        worker.missed_polls = 0 if responded else worker.missed_polls + 1
        if worker.missed_polls >= MAX_MISSED_POLLS:
            event(logger, "worker_hangs", level=logging.ERROR, worker=worker.number, pid=worker.process.pid)
            worker.kill()
        elif worker.is_silent != was_silent:
            name, level = ("worker_silent", logging.WARNING) if worker.is_silent else ("worker_responds", logging.INFO)
            event(logger, name, level=level, worker=worker.number, pid=worker.process.pid)
            await self._on_silence_changed()
        return duration_s

    async def _poll(self, worker: WorkerProcess, timeout_s: float) -> bool:
        try:
            await worker.poll(timeout_s=timeout_s)
        except (*UNREACHABLE, CallRejectedError):
            return False
        finally:
            self.add_decisions(worker)
        return True


def pause_after(duration_s: float) -> float:
    """Seconds until the next poll, by the duration of the last one."""
    return min(MAX_POLL_S, max(POLL_S, duration_s / POLL_SHARE))
