"""A router in its own process, which a test can measure, stop and starve."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from routing.schema import Limits, RouterConfig, dump_snapshot
from tests.fakes.replica import FakeReplica
from tests.routing.proxy.harness import config


class Process:
    """A router in its own process, whose memory is measured."""

    def __init__(self, popen: subprocess.Popen[bytes], errors: Path, port: int, admin_port: int) -> None:
        self.port = port
        self.admin_port = admin_port
        self.pid = popen.pid
        self.errors = errors  # what it has written to standard error
        self._proc = Path(f"/proc/{popen.pid}")

    def memory_bytes(self, field: str) -> int:
        """``VmRSS``: current, or ``VmHWM``: the peak since ``forget_peak``."""
        parsed = re.search(rf"{field}:\s+(\d+) kB", (self._proc / "status").read_text())
        assert parsed
        return int(parsed[1]) * 1024

    def stop(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def cpu_s(self) -> float:
        """CPU time of the process so far."""
        fields = (self._proc / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def forget_peak(self) -> None:
        (self._proc / "clear_refs").write_text("5")


@asynccontextmanager
async def started(
    replica: FakeReplica,
    folder: Path,
    limits: Limits,
    *,
    snapshot: RouterConfig | None = None,
    open_files: int | None = None,
) -> AsyncIterator[Process]:
    """A router for one replica. ``open_files``: the process may raise its limit no further."""
    file = folder / "config.json"
    file.write_bytes(dump_snapshot(snapshot or config([replica], limits=limits), 1).document)
    command = [sys.executable, "-m", "routing", "serve", "--port=0", "--admin-port=0"]
    command += ["--config", str(file), "--state-dir", str(folder / "state"), "--name", "flooded"]
    if open_files is not None:
        command = ["sh", "-c", f'ulimit -n {open_files} && exec "$@"', "sh", *command]
    errors = folder / "errors"
    with errors.open("w") as stderr:
        popen = subprocess.Popen(command, stderr=stderr)
    try:
        yield Process(popen, errors, *await _ports(popen, errors))
    finally:
        popen.kill()
        popen.wait()


async def _ports(popen: subprocess.Popen[bytes], errors: Path) -> tuple[int, int]:
    async with asyncio.timeout(60):
        while popen.poll() is None:
            text = await asyncio.to_thread(errors.read_text)
            if parsed := re.search(r"ready: http://127.0.0.1:(\d+) \(admin http://127.0.0.1:(\d+)", text):
                return int(parsed[1]), int(parsed[2])
            await asyncio.sleep(0.05)
    raise AssertionError(await asyncio.to_thread(errors.read_text))
