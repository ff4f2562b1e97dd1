"""Workers are polled: what they counted and decided, and whether they answer at all.

Theory of operation. Every worker is polled about once a second, and whenever somebody asks for figures. One that
leaves a poll of the first kind unanswered is silent: then another one accepts from its sockets as well, so that nobody
new waits for a worker that hangs. When it answers again it has them to itself; after ``SILENT_POLLS`` in a row it is
killed. Polls are counted and not seconds, because after a pause of the whole machine everybody would have been silent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from routing.proxy.log import event
from routing.workers.channel import DeclinedError
from routing.workers.process import GONE, WorkerProcess
from routing.workers.sequence import DecisionSequence

POLL_S = 1.0  # between polls of a worker; what it counted since the last one is lost if it is killed
LONGEST_POLL_S = 5.0  # the same where polling takes long
POLL_SHARE = 0.02  # of the time, that goes into polling: 60 ms a worker with 1,000 replicas, beside its requests
PATIENCE_S = 3.0  # that a poll waits
SILENT_POLLS = 8  # without an answer, half a minute

logger = logging.getLogger(__name__)


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
