"""A measured proxy process and its CPU time."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

DEADLINE_S = 90.0
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Proxy:
    """A listening process, measured with its child processes; ``pid`` None: nothing to measure."""

    name: str
    port: int
    pid: int | None
    admin_port: int | None = None
    figures: dict[str, list[float]] = field(default_factory=dict)

    def record(self, **figures: float) -> None:
        for name, value in figures.items():
            self.figures.setdefault(name, []).append(value)

    def figure(self, name: str) -> float | None:
        return median(self.figures[name]) if name in self.figures else None

    def text(self, name: str) -> str:
        """Median with minimum and maximum over the rounds."""
        if name not in self.figures:
            return "-"
        return f"{self.figure(name):.4g} ({min(self.figures[name]):.3g}-{max(self.figures[name]):.3g})"

    def cpu_s(self) -> float:
        total = 0
        for pid in self.pids():
            after_name = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
            total += int(after_name[11]) + int(after_name[12])
        return total / _TICKS

    def wanted_s(self) -> float:
        """CPU time that its threads used, or for which those that have not ended waited."""
        waited_ns = 0
        for thread in [thread for pid in self.pids() for thread in Path(f"/proc/{pid}/task").iterdir()]:
            with suppress(OSError):  # it has just ended
                waited_ns += int((thread / "schedstat").read_text("ascii").split()[1])
        return self.cpu_s() + waited_ns / 1e9

    def memory_mib(self) -> float:
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text("ascii").split()[1]) for pid in self.pids())
        return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)

    def pids(self) -> Iterator[int]:
        return iter(()) if self.pid is None else family(self.pid)


def family(pid: int) -> Iterator[int]:
    yield pid
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # a thread or a child that has just ended
            for child in (thread / "children").read_text("ascii").split():
                yield from family(int(child))


class NotListeningError(RuntimeError):
    """A proxy ended, or does not accept connections. The text has no paths: it may be published."""


@contextmanager
def listening(name: str, command: Sequence[str], port: int) -> Iterator[Proxy]:
    """Run a program for the length of a block; ready when it accepts connections."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        _wait_for(name, port, process)
        yield Proxy(name, port, process.pid)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5.0)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also what it has started and left
        process.wait(timeout=DEADLINE_S)


def _wait_for(name: str, port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    raise NotListeningError(f"{name} does not listen: exit status {process.poll()}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
