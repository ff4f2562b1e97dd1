"""Starts children in order, shows what they say, restarts what ends, and leaves nothing behind.

Theory of operation. Each child runs in a session of its own, so that a signal to its group reaches grandchildren
too, and carries a parent-death signal, so that it goes even when the supervisor is killed. ``start`` returns once
the child is ready; one that ends before that is a ``StartError`` with the end of its log. After that a watcher
kills what the child left of its group and restarts it after a growing pause. ``stop`` asks all groups at once, latest
started first, and kills what remains after a grace period.

A child writes to a pipe of ours, not to one that asyncio makes: ``Process.wait`` of asyncio waits until its own pipes
are closed (Python 3.11), and a grandchild that outlives the child keeps them open.
"""

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import IO

from controlplane.stack.paths import Child

GRACE_S = 8.0  # between the polite signal and the kill
PAUSES_S = (1.0, 2.0, 5.0, 10.0)  # before a restart, growing while a child keeps ending
STEADY_S = 30.0  # a child that lived this long starts again with the shortest pause
READY_POLL_S = 0.1
MOST_LINE_BYTES = 1 << 20  # a longer line is dropped
COLOURS = (36, 33, 32, 35, 34, 31)


class StartError(RuntimeError):
    """A child ended, or did not become ready in time, while the stack was starting."""


@dataclass
class Running:
    """A started child and the end of what it said."""

    child: Child
    process: asyncio.subprocess.Process
    started: float
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    relay: asyncio.Task[None] | None = None  # reads what it says; ends after it


class Supervisor:
    """The children of one stack."""

    def __init__(self, *, width: int = 10, colour: bool | None = None) -> None:
        self._running: dict[str, Running] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._width = width
        self._colour = sys.stdout.isatty() if colour is None else colour

    async def start(self, children: Iterable[Child], *, timeout_s: float = 60.0) -> None:
        """Start children side by side and wait until all are ready; StartError names the one that is not."""
        begun = [await self._spawn(child) for child in children]
        await asyncio.gather(*(self._until_ready(running, timeout_s) for running in begun))
        for running in begun:
            if running.child.restart:
                self._background(self._watch(running))

    async def run_once(self, child: Child, *, timeout_s: float = 120.0) -> None:
        """Run a child to its end; StartError if that is not a good one."""
        running = await self._spawn(child)
        try:
            status = await asyncio.wait_for(running.process.wait(), timeout_s)
        except TimeoutError:
            raise StartError(f"{child.name} did not end within {timeout_s:g} s") from None
        del self._running[child.name]
        last_words = await self._last_words(running, status)
        if status:
            raise StartError(last_words)

    async def stop(self) -> None:
        """End every child and its descendants; returns when none is left."""
        self._stopping = True
        for task in self._tasks:
            task.cancel()
        for running in reversed(list(self._running.values())):
            _signal_group(running, running.child.stop_signal)
        waits = [running.process.wait() for running in self._running.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), GRACE_S)
        for running in self._running.values():
            _signal_group(running, signal.SIGKILL)
            await running.process.wait()
        self._running.clear()

    def say(self, name: str, text: str) -> None:
        """Print one line under a name, in that name's colour."""
        label = f"{name:<{self._width}}"
        if self._colour:
            label = f"\033[{COLOURS[sum(name.encode()) % len(COLOURS)]}m{label}\033[0m"
        print(f"{label} {text}", flush=True)  # noqa: T201 - talking to a terminal is this file's purpose

    async def _spawn(self, child: Child) -> Running:
        reading, writing = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *child.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=writing,
                stderr=asyncio.subprocess.STDOUT,
                **child.popen_options(),  # type: ignore[arg-type]
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        running = Running(child, process, time.monotonic())
        self._running[child.name] = running
        running.relay = self._background(self._relay(running, os.fdopen(reading, "rb", 0)))
        return running

    async def _until_ready(self, running: Running, timeout_s: float) -> None:
        deadline = running.started + timeout_s
        while not await asyncio.to_thread(running.child.ready):
            if running.process.returncode is not None:
                raise StartError(await self._last_words(running, running.process.returncode))
            if time.monotonic() > deadline:
                raise StartError(f"{running.child.name} was not ready within {timeout_s:g} s")
            await asyncio.sleep(READY_POLL_S)

    async def _relay(self, running: Running, output_pipe: IO[bytes]) -> None:
        async with _reader(output_pipe) as output:
            async for line in _lines(output):
                running.tail.append(line)
                self.say(running.child.name, line)

    async def _watch(self, running: Running) -> None:
        failures = 0
        while True:
            status = await running.process.wait()
            _signal_group(running, signal.SIGKILL)  # grandchildren that outlived it would work on beside its successor
            failures = 0 if time.monotonic() - running.started > STEADY_S else failures + 1
            pause = running.child.restart_pause_s or PAUSES_S[min(failures, len(PAUSES_S) - 1)]
            self.say(running.child.name, f"ended ({_describe(status)}); starting it again in {pause:g} s")
            await asyncio.sleep(pause)
            if self._stopping:
                return
            running = await self._spawn(running.child)

    def _background(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    async def _last_words(running: Running, status: int) -> str:
        if running.relay:
            await asyncio.wait({running.relay}, timeout=1)  # a grandchild may hold the pipe open
        said = "\n".join(f"    {line}" for line in running.tail)
        return f"{running.child.name} ended ({_describe(status)}) while starting. The end of what it said:\n{said}"


@contextlib.asynccontextmanager
async def _reader(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    """A stream of what is written into a pipe, which is closed at the end."""
    stream = asyncio.StreamReader(limit=MOST_LINE_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), pipe)
    try:
        yield stream
    finally:
        transport.close()


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    while True:
        try:
            raw = await stream.readline()
        except ValueError:  # longer than the limit: the reader dropped it
            continue
        if not raw:
            return
        yield raw.decode(errors="replace").rstrip()


def _signal_group(running: Running, number: signal.Signals) -> None:
    """Signal a child's whole session; what has already gone is no error."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, number)


def _describe(status: int) -> str:
    return f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
