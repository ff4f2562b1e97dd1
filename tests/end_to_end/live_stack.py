"""Starts and stops the stack of ``make run`` on free ports, with a data folder of its own."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.pace import slowdown  # noqa: F401 - who waits for a stack says how long by it

ROOT = Path(__file__).resolve().parents[2]
PASSWORD = "correct-horse-battery-staple"
READY = "Warmpath is ready: "
FIRST_START_S = 180
BROWSER_MS = 60_000
BLANK_PAGE = "about:blank"  # for long waits: a page that refreshes itself costs browser and web process much


class StackFailedError(AssertionError):
    """The stack exited or a wait timed out; includes the end of the log."""


class LiveStack:
    """One running ``make run``."""

    def __init__(self, data_dir: Path, **environment: str) -> None:
        self.web_port, self.router_port, self.admin_port, self.replica_port = free_ports(4, spare_after_last=8)
        self.data_dir = data_dir
        self._environment = {
            "WARMPATH_WEB_PORT": str(self.web_port),
            "WARMPATH_ROUTER_PORT": str(self.router_port),
            "WARMPATH_ROUTER_ADMIN_PORT": str(self.admin_port),
            "WARMPATH_REPLICA_PORT": str(self.replica_port),
            "WARMPATH_DATA_DIR": str(data_dir),
            "WARMPATH_ADMIN_PASSWORD": PASSWORD,
            **environment,
        }
        self.timed_lines: list[tuple[float, str]] = []
        self._process: subprocess.Popen[str] | None = None

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for commands that address this stack."""
        return outside_pytest(self._environment)

    @property
    def lines(self) -> list[str]:
        """Log lines so far."""
        return [line for _at, line in self.timed_lines]

    @property
    def web(self) -> str:
        """Base URL of the web UI."""
        return f"http://127.0.0.1:{self.web_port}"

    @property
    def router(self) -> str:
        """Base URL of the router's data port."""
        return f"http://127.0.0.1:{self.router_port}"

    def start(self, *, within_s: float) -> None:
        """Run ``make run`` until it is ready."""
        self._process = subprocess.Popen(
            ["make", "run"],
            cwd=ROOT,
            env=outside_pytest(self._environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # a terminal of its own, which Ctrl-C is sent to
        )
        threading.Thread(target=self._read, daemon=True).start()
        self.until(lambda: any(line.startswith(READY) for line in self.lines), within_s, "the ready line")

    def interrupt(self, *, within_s: float = 20) -> None:
        """Send Ctrl-C to the process group and wait for the exit."""
        assert self._process is not None
        os.killpg(self._process.pid, signal.SIGINT)
        self._process.wait(timeout=within_s)

    def until_gone(self, within_s: float = 10) -> None:
        """Wait until no process of this stack is left."""
        deadline = time.monotonic() + within_s
        while left := self.pids():
            assert time.monotonic() < deadline, f"left behind: {list(left)}"
            time.sleep(0.1)

    def kill(self) -> None:
        """Stop everything that is left, after a failed test too."""
        if self._process and self._process.poll() is None:
            with contextlib.suppress(Exception):
                self.interrupt()
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def until(self, condition: Callable[[], Any], within_s: float, what: str, *, every_s: float = 0.5) -> Any:
        """Wait for a truthy value and return it; StackFailedError on timeout. A condition may cost a request."""
        deadline = time.monotonic() + within_s
        while True:
            with contextlib.suppress(httpx.TransportError):
                if outcome := condition():
                    return outcome
            ended = self._process is not None and self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                why = "the stack ended" if ended else f"waited {within_s:g} s"
                raise StackFailedError(f"{why}, for {what}\n" + "\n".join(self.lines[-60:]))
            time.sleep(every_s)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Add the end of the log to an assertion that fails inside the block."""
        try:
            yield
        except AssertionError as error:
            raise StackFailedError(f"{error}\n" + "\n".join(self.lines[-60:])) from error

    def pids(self, pattern: str = "") -> dict[str, int]:
        """Process ids of this stack by command line, filtered by a pattern; found by their environment."""
        mark = f"WARMPATH_DATA_DIR={self.data_dir}".encode()
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                if command and mark in (process / "environ").read_bytes() and re.search(pattern, command):
                    found[f"{command.strip()} #{process.name}"] = int(process.name)
        return found

    def manage(self, *arguments: str) -> str:
        """Run a management command against this stack; its output."""
        command = [str(ROOT / ".venv/bin/python"), "manage.py", *arguments]
        environment = outside_pytest(self._environment)
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextlib.contextmanager
    def rest(self) -> Iterator[httpx.Client]:
        """A REST client with a new admin token."""
        with signed_in(self.web) as browser:
            headers = {"Authorization": f"Bearer {admin_token(browser)}", "If-Match": "*"}
        with httpx.Client(base_url=f"{self.web}/api/v1/", headers=headers, timeout=20, trust_env=False) as client:
            yield client

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as said:
            for line in said:
                self._hear(line)

    def _hear(self, line: str) -> None:
        self.timed_lines.append((time.monotonic(), line.rstrip("\n")))


@contextlib.contextmanager
def signed_in(url: str) -> Iterator[httpx.Client]:
    """A browser session of the administrator of a running stack."""
    with httpx.Client(base_url=url, timeout=60, trust_env=False, follow_redirects=True) as client:
        client.get("/accounts/login/")
        form = {"login": "admin", "password": PASSWORD, "csrfmiddlewaretoken": client.cookies["csrftoken"]}
        assert client.post("/accounts/login/", data=form, headers={"Referer": url}).status_code == 200
        yield client


def admin_token(browser: httpx.Client) -> str:
    """A new token for the REST API, from the page: a process for the command takes ten times the CPU time."""
    form = {"name": "tests", "scope": "admin", "csrfmiddlewaretoken": browser.cookies["csrftoken"]}
    page = browser.post("/tokens/", data=form, headers={"Referer": str(browser.base_url)})
    shown = re.search(r"<code>(wp_[^<\s]+)</code>", page.text)
    assert shown, page.text
    return shown[1]


def outside_pytest(more: dict[str, str]) -> dict[str, str]:
    """The environment without what pytest sets."""
    return {name: value for name, value in os.environ.items() if name != "DJANGO_SETTINGS_MODULE"} | more


def free_ports(count: int, *, spare_after_last: int) -> list[int]:
    """Consecutive free ports below the ephemeral range, with spare ones after the last.

    Parallel test processes draw from disjoint ranges.
    """
    mine = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 8
    while True:
        start = random.randrange(12_000 + 32 * mine, 30_000, 32 * 8)
        wanted = range(start, start + count + spare_after_last)
        if all(_is_free(port) for port in wanted):
            return list(wanted)[:count]


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
