"""One worker, as its parent sees it.

Workers are polled: what they counted and decided, and whether they answer at all.

Theory of operation. Every worker is polled about once a second, and whenever somebody asks for figures. One that
leaves a poll of the first kind unanswered is silent: then another one accepts from its sockets as well, so that nobody
new waits for a worker that hangs. When it answers again it has them to itself; after ``SILENT_POLLS`` in a row it is
killed. Polls are counted and not seconds, because after a pause of the whole machine everybody would have been silent.
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
from routing.workers.messages import (
    Channel,
    ChannelClosedError,
    DeclinedError,
    Preparation,
    WorkerOrders,
    WorkerStatus,
    as_plain,
)
from routing.workers.metrics import Families, parse
from routing.workers.sequence import DecisionSequence, KeptBook

START_S = 30.0  # in which a worker begins to answer
ANSWER_S = 10.0  # in which it answers anything but a new configuration and a drain
PREPARE_S = 15.0  # a configuration of a thousand replicas takes a second
END_S = 5.0  # in which it ends, once nothing runs
_CHUNK = 1000  # records at a time

GONE = (ChannelClosedError, TimeoutError)

logger = logging.getLogger(__name__)


class WorkerProcess:
    """A process and the channel to it. Its decisions are a ``Book``."""

    def __init__(self, orders: WorkerOrders, process: asyncio.subprocess.Process, channel: Channel) -> None:
        self.number = orders.number
        self.row = orders.row
        self.process = process
        self.channel = channel
        self.has_begun = False  # answers
        self.is_ready = False  # has the configuration, if there is one, and may accept
        self.listening: list[int] = []  # slots, as it was last told
        self.figures: Families = {}
        self.rows: list[dict[str, Any]] = []  # its replicas
        self.in_flight = 0
        self.first, self.last = 1, 0  # decisions
        self.noted = 0  # of them, those that have a number in the sequence
        self.unanswered = 0  # polls in a row
        self._running = asyncio.create_task(channel.run())

    @classmethod
    async def start(cls, orders: WorkerOrders, end: socket.socket, inherited: Sequence[int]) -> WorkerProcess:
        """A new process; OSError where there can be none."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "routing.workers.worker",
            msgspec.json.encode(orders).decode(),
            pass_fds=inherited,
            start_new_session=True,  # a terminal's Ctrl-C is the parent's
        )
        return cls(orders, process, await Channel.open(end, _answer_nothing))

    @property
    def is_silent(self) -> bool:
        """Whether it did not answer when it was last polled."""
        return self.unanswered > 0

    async def begin(self) -> None:
        """Wait until it answers."""
        await self.poll(timeout_s=START_S)
        self.has_begun = True

    async def poll(self, *, timeout_s: float = ANSWER_S) -> None:
        """See how it is."""
        seen = msgspec.convert(await self.channel.ask("poll", timeout_s=timeout_s), WorkerStatus)
        self.figures = parse(seen.metrics)
        self.rows, self.in_flight = seen.replicas, seen.in_flight
        self.first, self.last = seen.first_decision, max(self.last, seen.last_decision)

    async def prepare(self, preparation: Preparation) -> None:
        """Let it make a configuration ready."""
        await self.channel.ask("prepare", as_plain(preparation), timeout_s=PREPARE_S)

    async def commit(self) -> None:
        """Let it put that into force."""
        await self.channel.ask("commit", timeout_s=ANSWER_S)

    async def listen(self, slots: list[int]) -> None:
        """Let it accept from these slots' sockets alone."""
        if slots != self.listening:
            self.listening = slots
            await self.channel.ask("listen", slots, timeout_s=ANSWER_S)

    async def explain(self, asked: bytes) -> dict[str, Any]:
        """The decision that a request would get there."""
        try:
            explained: dict[str, Any] = await self.channel.ask("explain", asked, timeout_s=ANSWER_S)
        except DeclinedError as error:
            status, message = error.facts.get("status", 500), error.facts.get("message", "internal error")
            raise RejectedRequestError(status, message) from None
        return explained

    async def read(self, first: int, last: int, ratio: float = 1.0) -> list[dict[str, Any]]:
        """Its decisions from one number to another, page by page; those that it told before it was gone."""
        found: list[dict[str, Any]] = []
        with suppress(*GONE, DeclinedError):
            while first <= last:
                page = await self.channel.ask("decisions", [first, last, ratio], timeout_s=ANSWER_S)
                if not page:
                    break
                found += page
                first = page[-1]["seq"] + 1
        return found

    async def leave(self) -> None:
        """Let it accept nothing more."""
        self.listening = []
        await self.channel.ask("leave", timeout_s=ANSWER_S)

    async def drain(self, linger_s: float, *, timeout_s: float) -> None:
        """Let it accept nothing more and wait until it is idle; then see it a last time."""
        with suppress(*GONE, DeclinedError):
            await self.channel.ask("drain", linger_s, timeout_s=timeout_s)
            await self.poll()

    async def kept(self) -> KeptBook:
        """Its decisions, to be read when it has ended."""
        records: list[dict[str, Any]] = []
        for first in range(self.first, self.last + 1, _CHUNK):
            records += await self.read(first, min(first + _CHUNK - 1, self.last))
        return KeptBook(records)

    async def end(self) -> None:
        """Close the channel, which ends an idle one; kill it if that takes longer."""
        self.channel.close()
        try:
            async with asyncio.timeout(END_S):
                await self.process.wait()
        except TimeoutError:
            self.kill()
            await self.process.wait()
        self._running.cancel()

    def kill(self) -> None:
        """End it now."""
        with suppress(ProcessLookupError):
            self.process.kill()


async def _answer_nothing(question: str, _: Any) -> None:
    raise DeclinedError(reason=f"a parent does not answer {question}")


async def or_kill(worker: WorkerProcess, order: Callable[[], Awaitable[None]]) -> None:
    """Let an order be carried out, or end the worker; its successor begins with what is in force."""
    try:
        await order()
    except (*GONE, DeclinedError) as error:
        event(logger, "worker_disobeyed", level=logging.ERROR, worker=worker.number, reason=repr(error))
        worker.kill()


POLL_S = 1.0  # between polls of a worker; what it counted since the last one is lost if it is killed
LONGEST_POLL_S = 5.0  # the same where polling takes long
POLL_SHARE = 0.02  # of the time, that goes into polling: 60 ms a worker with 1,000 replicas, beside its requests
PATIENCE_S = 3.0  # that a poll waits
SILENT_POLLS = 8  # without an answer, half a minute


class WorkerPoller:
    """Polls all workers of a router."""

    def __init__(
        self,
        processes: Callable[[], list[WorkerProcess]],
        sequence: DecisionSequence,
        silence_changed: Callable[[], Awaitable[None]],
    ) -> None:
        self._processes = processes
        self._sequence = sequence
        self._silence_changed = silence_changed  # hears of each worker that falls silent or answers again

    async def keep_polling(self) -> None:
        """For ever."""
        took_s = 0.0
        while True:
            await asyncio.sleep(pause_after(took_s))
            took_s = max(await asyncio.gather(*map(self._judge, self._processes())), default=0.0)

    async def poll(self, timeout_s: float) -> None:
        """See how all are that answer; those that take longer than that are as they were last seen."""
        await asyncio.gather(*(self._answers(it, timeout_s) for it in self._processes() if not it.is_silent))

    def note(self, worker: WorkerProcess) -> None:
        """Number the decisions that are new."""
        self._sequence.note(worker, worker.noted)
        worker.noted = worker.last

    async def _judge(self, worker: WorkerProcess) -> float:
        """Look, and see whether it is silent; seconds until its answer came, if one did."""
        time, was_silent = asyncio.get_running_loop().time, worker.is_silent
        began_at = time()
        answers = await self._answers(worker, PATIENCE_S)
        took_s = time() - began_at if answers else 0.0
        worker.unanswered = 0 if answers else worker.unanswered + 1
        if worker.unanswered >= SILENT_POLLS:
            event(logger, "worker_hangs", level=logging.ERROR, worker=worker.number, pid=worker.process.pid)
            worker.kill()
        elif worker.is_silent != was_silent:
            name, level = ("worker_silent", logging.WARNING) if worker.is_silent else ("worker_answers", logging.INFO)
            event(logger, name, level=level, worker=worker.number, pid=worker.process.pid)
            await self._silence_changed()
        return took_s

    async def _answers(self, worker: WorkerProcess, timeout_s: float) -> bool:
        try:
            await worker.poll(timeout_s=timeout_s)
        except (*GONE, DeclinedError):
            return False
        finally:
            self.note(worker)
        return True


def pause_after(took_s: float) -> float:
    """Seconds until the next poll, by how long this one took."""
    return min(LONGEST_POLL_S, max(POLL_S, took_s / POLL_SHARE))
