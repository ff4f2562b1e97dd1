"""Process supervisor: starts processes in order, prints their output, restarts those that end, and stops all of them.

Theory of operation. Each child runs in its own session, so that a signal to its process group reaches grandchildren,
and has a parent-death signal, so that it ends even if the supervisor is killed. ``start`` returns when the child is
ready; a child that ends earlier raises ``StartError`` with the end of its output. Afterwards a watcher kills the rest
of an ended child's group and restarts the child after an increasing delay. ``stop`` signals all groups, in reverse
order of start, and kills those that remain after a grace period.

The output pipe is created here and not by asyncio: asyncio's ``Process.wait`` waits until its own pipes are closed
(Python 3.11), and a grandchild that outlives the child keeps them open.
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

GRACE_S = 8.0  # between the stop signal and SIGKILL
RESTART_DELAYS_S = (1.0, 2.0, 5.0, 10.0)  # by number of consecutive failures
STABLE_S = 30.0  # uptime after which the failure count restarts
READY_POLL_S = 0.1
MAX_LINE_BYTES = 1 << 20  # longer lines are dropped
COLOURS = (36, 33, 32, 35, 34, 31)


class StartError(RuntimeError):
    """A child ended, or did not become ready in time, while the stack was starting."""


@dataclass
class RunningChild:
    """A started child and the last lines of its output."""

    child: Child
    process: asyncio.subprocess.Process
    started_at_s: float
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=20))
    relay: asyncio.Task[None] | None = None  # prints its output


class Supervisor:
    """Supervises the children of one stack."""

    def __init__(self, *, width: int = 10, colour: bool | None = None) -> None:
        self._running: dict[str, RunningChild] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopping = False
        self._width = width
        self._colour = sys.stdout.isatty() if colour is None else colour

    async def start(self, children: Iterable[Child], *, timeout_s: float = 60.0) -> None:
        """Start children concurrently and wait until all are ready; StartError names a child that is not."""
        started = [await self._spawn(child) for child in children]
        await asyncio.gather(*(self._wait_until_ready(running, timeout_s) for running in started))
        for running in started:
            if running.child.restart:
                self._run_in_background(self._watch(running))

    async def run_once(self, child: Child, *, timeout_s: float = 120.0) -> None:
        """Run a child until it exits; StartError on a timeout or a nonzero status."""
        running = await self._spawn(child)
        try:
            status = await asyncio.wait_for(running.process.wait(), timeout_s)
        except TimeoutError:
            raise StartError(f"{child.name} did not end within {timeout_s:g} s") from None
        del self._running[child.name]
        failure = await self._start_failure(running, status)
        if status:
            raise StartError(failure)

    async def stop(self) -> None:
        """Stop all children and their descendants."""
        self._stopping = True
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # one may be starting a child: it is killed then
        for running in reversed(list(self._running.values())):
            _signal_group(running, running.child.stop_signal)
        waits = [running.process.wait() for running in self._running.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*waits), GRACE_S)
        for running in self._running.values():
            _signal_group(running, signal.SIGKILL)
            await running.process.wait()
        self._running.clear()

    def print_line(self, name: str, text: str) -> None:
        """Print one line after a coloured name."""
        label = f"{name:<{self._width}}"
        if self._colour:
            label = f"\033[{COLOURS[sum(name.encode()) % len(COLOURS)]}m{label}\033[0m"
        print(f"{label} {text}", flush=True)  # noqa: T201 - terminal output

    async def _spawn(self, child: Child) -> RunningChild:
        read_end, write_end = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *child.command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=write_end,
                stderr=asyncio.subprocess.STDOUT,
                **child.popen_options(),  # type: ignore[arg-type]
            )
        except BaseException:
            os.close(read_end)
            raise
        finally:
            os.close(write_end)
        running = RunningChild(child, process, time.monotonic())
        self._running[child.name] = running
        running.relay = self._run_in_background(self._relay(running, os.fdopen(read_end, "rb", 0)))
        return running

    async def _wait_until_ready(self, running: RunningChild, timeout_s: float) -> None:
        deadline = running.started_at_s + timeout_s
        while not await asyncio.to_thread(running.child.ready):
            if running.process.returncode is not None:
                raise StartError(await self._start_failure(running, running.process.returncode))
            if time.monotonic() > deadline:
                raise StartError(f"{running.child.name} was not ready within {timeout_s:g} s")
            await asyncio.sleep(READY_POLL_S)

    async def _relay(self, running: RunningChild, output_pipe: IO[bytes]) -> None:
        async with _reader(output_pipe) as output:
            async for line in _lines(output):
                running.tail.append(line)
                self.print_line(running.child.name, line)

    async def _watch(self, running: RunningChild) -> None:
        """Restart a child whenever it ends, after a pause that grows with consecutive failures."""
        failures = 0
        while True:
            status = await running.process.wait()
            _signal_group(running, signal.SIGKILL)  # grandchildren must not run next to the new child
            failures = 0 if time.monotonic() - running.started_at_s > STABLE_S else failures + 1
            pause_s = running.child.restart_pause_s or RESTART_DELAYS_S[min(failures, len(RESTART_DELAYS_S) - 1)]
            self.print_line(running.child.name, f"ended ({_describe(status)}); restarting in {pause_s:g} s")
            await asyncio.sleep(pause_s)
            if self._stopping:
                return
            running = await self._spawn(running.child)

    def _run_in_background(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    @staticmethod
    async def _start_failure(running: RunningChild, status: int) -> str:
        if running.relay:
            await asyncio.wait({running.relay}, timeout=1)  # a grandchild may hold the pipe open
        tail = "\n".join(f"    {line}" for line in running.tail)
        return f"{running.child.name} ended ({_describe(status)}) while starting. Last output:\n{tail}"


@contextlib.asynccontextmanager
async def _reader(pipe: IO[bytes]) -> AsyncIterator[asyncio.StreamReader]:
    """A stream reader of a pipe; closes the pipe at the end."""
    stream = asyncio.StreamReader(limit=MAX_LINE_BYTES)
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
        except ValueError:  # over the limit: the reader dropped the line
            continue
        if not raw:
            return
        yield raw.decode(errors="replace").rstrip()


def _signal_group(running: RunningChild, signal_number: signal.Signals) -> None:
    """Signal a child's whole process group, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.process.pid, signal_number)


def _describe(status: int) -> str:
    return f"status {status}" if status >= 0 else f"signal {signal.Signals(-status).name}"
