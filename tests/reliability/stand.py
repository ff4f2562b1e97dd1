"""A control plane of real processes, each of which can be killed, frozen, restarted or left down."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from controlplane.stack import plan
from controlplane.stack.paths import Child
from controlplane.stack.servers import EmbeddedPostgres, valkey_child
from tests.conftest import wait_until
from tests.end_to_end.live_stack import PASSWORD, ROOT, admin_token, free_ports, outside_pytest, signed_in
from tests.pace import slowdown

STATEMENT_S = 4  # PostgreSQL's statement timeout in these tests; 15 by default
START_S = 90  # start of any process, on a busy machine
NO_REPLICA = "http://127.0.0.1:9"  # a replica that is down, so that each tick is quick


class ManagedProcess:
    """One process and its log."""

    def __init__(self, child: Child, environment: dict[str, str], folder: Path = ROOT) -> None:
        self.child = child
        self.lines: list[str] = []
        self._environment = environment
        self._folder = folder
        self._process: subprocess.Popen[str] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.poll() is None

    def start(self, *, wait: bool = True) -> None:
        """Start the process and wait until it is ready."""
        options = self.child.popen_options()
        options["env"] = {**self._environment, **self.child.environment, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            list(self.child.command),
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **options,
        )
        threading.Thread(target=self._read, args=(self._process,), daemon=True).start()
        if wait:
            self.until_ready()

    def until_ready(self, within_s: float = START_S) -> None:
        """Wait until the process is ready; the end of its log on failure."""
        try:
            wait_until(self.child.ready, within_s, f"{self.child.name} to be ready", alive=self._process, every_s=0.1)
        except BaseException:
            print("\n".join(self.lines[-40:]))  # noqa: T201 - pytest shows it with the failure
            raise

    def kill(self) -> None:
        """``kill -9`` the process and its descendants."""
        self._signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> None:
        """Terminate gracefully."""
        if self.is_running:
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, self.child.stop_signal)
            self.wait()

    def freeze(self) -> None:
        """SIGSTOP the process group; its connections stay open."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT the process group."""
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def family(self) -> list[int]:
        """The process and its descendants, which may have sessions of their own."""
        pids, parents = [self.pid], [self.pid]
        while parents:
            parents = [child for pid in parents for child in _children(pid)]
            pids += parents
        return pids

    def wait(self, within_s: float = 30) -> int:
        """Wait for the exit; the exit status."""
        assert self._process is not None
        return self._process.wait(timeout=within_s)

    def log_lines(self, pattern: str, *, since: int = 0) -> list[str]:
        """Log lines that match, from a position on."""
        return [line for line in list(self.lines[since:]) if re.search(pattern, line)]

    def _signal(self, number: signal.Signals) -> None:
        for pid in self.family():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout as lines:
            for line in lines:
                self.lines.append(line.rstrip("\n"))


class Stand:
    """PostgreSQL, Valkey, web and worker as ``make run`` starts them, without a supervisor."""

    def __init__(self, folder: Path, **environment: str) -> None:
        self.folder = folder
        self.web_port, self._router_port, self._admin_port = free_ports(3, spare_after_last=0)
        self._server = EmbeddedPostgres(folder / "postgres", folder / "pg")
        self._socket = folder / "vk" / "s"
        self.environment = outside_pytest(
            {
                "DJANGO_SETTINGS_MODULE": "controlplane.settings.dev",
                "NO_PROXY": "127.0.0.1",
                "WARMPATH_DATA_DIR": str(folder / "data"),
                "WARMPATH_DATABASE_URL": self.database_url,
                "WARMPATH_REDIS_URL": f"redis+socket://{self._socket}?virtual_host=0",
                "WARMPATH_WEB_PORT": str(self.web_port),
                "WARMPATH_ROUTER_PORT": str(self._router_port),
                "WARMPATH_ROUTER_ADMIN_PORT": str(self._admin_port),
                "WARMPATH_ADMIN_PASSWORD": PASSWORD,
                "WARMPATH_SCRAPE_INTERVAL_S": "1",
                "WARMPATH_RECONCILE_INTERVAL_S": "1",
                "WARMPATH_ALERT_GROUP_WAIT_S": "0",
                "WARMPATH_DATABASE_TIMEOUT_S": str(STATEMENT_S),
                "WARMPATH_TRAFFIC": "off",
                **environment,
            }
        )
        self._server.prepare()
        self.postgres = ManagedProcess(self._server.child("fsync=off"), self.environment)
        self.valkey = ManagedProcess(valkey_child(self._socket), self.environment)
        (folder / "data" / "static").mkdir(parents=True)
        planned = self._planned()
        self.web, self.router = (ManagedProcess(planned[name], self.environment) for name in ("web", "router"))
        self.worker = ManagedProcess(self._with_beat(planned["worker"], "beat-schedule"), self.environment)

    @property
    def database_url(self) -> str:
        return f"postgresql://postgres@/warmpath?host={self._server.socket_dir}"

    @property
    def url(self) -> str:
        """Base URL of the web UI."""
        return f"http://127.0.0.1:{self.web_port}"

    @property
    def parts(self) -> list[ManagedProcess]:
        """All processes, in the order of shutdown."""
        return [self.router, self.worker, self.web, self.valkey, self.postgres]

    def manage(self, *arguments: str, **environment: str) -> str:
        """Output of a management command; ``environment`` overrides variables."""
        done = subprocess.run(
            [sys.executable, "manage.py", *arguments],
            cwd=ROOT,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    @contextlib.contextmanager
    def process(self, name: str, *arguments: str) -> Iterator[ManagedProcess]:
        """A management command that runs for the length of a block."""
        part = ManagedProcess(Child(name, [sys.executable, "manage.py", *arguments]), self.environment)
        part.start(wait=False)
        try:
            yield part
        finally:
            part.kill()

    def start(self) -> None:
        """Start everything but a router."""
        self.postgres.start(wait=False)
        self.valkey.start(wait=False)
        self.postgres.until_ready()
        self.valkey.until_ready()
        self.manage("prepare_stack", "--demo", "--replica", NO_REPLICA)
        self.web.start(wait=False)
        self.worker.start(wait=False)
        self.web.until_ready()
        wait_until(lambda: self.ticked() is not None, START_S, "the worker's first tick", every_s=0.2)

    def another_worker(self, name: str, *prefix: str) -> ManagedProcess:
        """Start another worker with its own beat; ``prefix`` replaces ``python -m celery``."""
        child = self._with_beat(self._planned()["worker"], f"beat-{name}")
        command = [*prefix, *child.command[3:]] if prefix else child.command  # else: python -m celery
        return ManagedProcess(
            Child(name, [*command, "--hostname", f"{name}@test"], environment=child.environment), self.environment
        )

    @contextlib.contextmanager
    def rest(self) -> Iterator[httpx.Client]:
        """A REST client with a new token."""
        with self.browser() as browser:
            headers = {"Authorization": f"Bearer {admin_token(browser)}"}
        with httpx.Client(base_url=f"{self.url}/api/v1/", headers=headers, timeout=60, trust_env=False) as client:
            yield client

    def sql(self) -> psycopg.Connection[Any]:
        """A direct database connection."""
        return psycopg.connect(self.database_url, autocommit=True, connect_timeout=5)

    def query(self, statement: str, *parameters: Any) -> Any:
        """First value of a query's result."""
        with self.sql() as server:
            row = server.execute(statement, parameters or None).fetchone()  # type: ignore[arg-type]  # text of a test
            return row[0] if row else None

    @contextlib.contextmanager
    def browser(self) -> Iterator[httpx.Client]:
        """A signed-in browser session."""
        with signed_in(self.url) as client:
            yield client

    def restart_postgres(self) -> None:
        self._server.prepare()
        self.postgres.start()

    def ticked(self) -> Any:
        """The scraper's last tick; there is one per second."""
        return self.query("select max(at) from telemetry_scrapestate")

    def until_ticks_resume(self, within_s: float) -> float:
        """Wait for the next tick; seconds it took."""
        started, before = time.monotonic(), self.query("select now()")
        try:
            soon(lambda: (self.ticked() or before) > before, within_s, "ticks to resume")
        except BaseException:
            print("\n".join(self.worker.lines[-60:]))  # noqa: T201 - pytest shows it with the failure
            raise
        return time.monotonic() - started

    def stop(self) -> None:
        """Stop all processes and delete their files."""
        for part in self.parts:
            if part.is_running:
                part.thaw()
                part.kill() if part is not self.postgres else part.stop()

    def _planned(self) -> dict[str, Child]:
        """The local stack's child processes by name."""
        with _environment(self.environment):
            children = plan.control_plane(plan.StackSettings.from_environment(self.folder / "data"))
        return {child.name: child for child in children}

    def _with_beat(self, worker: Child, schedule: str) -> Child:
        """A worker with an embedded beat, so that both are killed and frozen together."""
        command = [*worker.command, "--beat", "--schedule", str(self.folder / schedule)]
        return Child(worker.name, command, environment=worker.environment)


@contextlib.contextmanager
def running_stand(**environment: str) -> Iterator[Stand]:
    """A started stand for the length of a block."""
    folder = Path(tempfile.mkdtemp(prefix="wpr-"))  # a path short enough for a socket
    folder.chmod(0o755)  # servers run as an account of their own
    stand = Stand(folder, **environment)
    try:
        stand.start()
        yield stand
    finally:
        stand.stop()
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except (OSError, ValueError):
        return []


def soon(condition: Callable[[], Any], within_s: float, description: str, *, every_s: float = 0.15) -> None:
    """Wait until a condition holds; ``within_s`` is scaled on a busy machine."""
    started, allowed_s = time.monotonic(), within_s
    while not condition():
        if (waited_s := time.monotonic() - started) > allowed_s:
            allowed_s = within_s * slowdown()
            if waited_s > allowed_s:
                pytest.fail(f"waited {waited_s:.1f} s for {description}; limit on an idle machine: {within_s:g} s")
        time.sleep(every_s)


def status_of(request: Callable[[], httpx.Response]) -> int | None:
    """Status of a response; None without one."""
    try:
        return request().status_code
    except httpx.TransportError:
        return None
