"""Servers that tests share: PostgreSQL and Valkey, started on first use."""

import gc
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest

from controlplane.stack.paths import Child
from controlplane.stack.servers import EmbeddedPostgres, valkey_child
from tests.side_by_side import (  # noqa: F401 - hooks
    pytest_collection_modifyitems,
    pytest_runtest_protocol,
    pytest_xdist_make_scheduler,
)

START_DEADLINE_S = 90
FLUSH_ATTEMPTS = 5

# The duration of an example depends on the machine; pytest limits each test as a whole. On the compiled router a few
# examples suffice: all of them run on the plain one.
hypothesis.settings.register_profile("any_machine", hypothesis.settings(), deadline=None)
hypothesis.settings.register_profile("compiled", hypothesis.settings(), deadline=None, max_examples=20)
hypothesis.settings.load_profile("compiled" if "TEST_COMPILED" in os.environ else "any_machine")


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freeze collected objects, so that garbage collection does not traverse thousands of tests again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def retry_flush() -> Iterator[None]:
    """Retry the flush of test tables after a deadlock with a request that a closed browser left running."""
    from django.core.management import CommandError
    from django.db import OperationalError
    from django.test import TransactionTestCase

    flush = TransactionTestCase._fixture_teardown

    def flush_with_retries(case: TransactionTestCase) -> None:
        for _ in range(FLUSH_ATTEMPTS - 1):
            try:
                return flush(case)
            except CommandError as error:
                if not isinstance(error.__cause__, OperationalError):
                    raise
        return flush(case)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", flush_with_retries)
        yield


@contextmanager
def running(child: Child) -> Iterator[None]:
    """Run a server for the length of a block."""
    options = child.popen_options()
    process = subprocess.Popen(list(child.command), stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **options)
    try:
        wait_until(child.ready, START_DEADLINE_S, f"{child.name} to start", alive=process)
        yield
    finally:
        process.send_signal(child.stop_signal)
        process.wait(timeout=20)


def wait_until(condition, timeout_s, description, *, alive=None, every_s=0.02):
    """Poll a condition; fail with its description on timeout or when the process ``alive`` has ended."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if alive is not None and alive.poll() is not None:
            pytest.fail(f"waiting for {description}, but the process ended with {alive.returncode}")
        if time.monotonic() > deadline:
            pytest.fail(f"waited {timeout_s} s for {description}")
        time.sleep(every_s)


@pytest.fixture(scope="session")
def short_dir() -> Iterator[Path]:
    """A folder with a path short enough for a Unix socket, readable by the servers' account."""
    folder = Path(tempfile.mkdtemp(prefix="wp-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres(short_dir: Path) -> Iterator[Path]:
    """PostgreSQL without fsync; the folder of its socket."""
    server = EmbeddedPostgres(short_dir / "postgres", short_dir / "pg")
    server.prepare()
    with running(server.child("fsync=off", "synchronous_commit=off", "full_page_writes=off")):
        yield server.socket_dir


@pytest.fixture(scope="session")
def django_db_modify_db_settings(postgres: Path) -> None:
    """Point Django at the test server."""
    from django.db import connections

    for settings in (connections.settings["default"], connections["default"].settings_dict):
        settings["HOST"] = str(postgres)


@pytest.fixture(scope="session")
def valkey(short_dir: Path) -> Iterator[str]:
    """A Redis-compatible server; its URL for Celery."""
    path = short_dir / "valkey" / "socket"
    with running(valkey_child(path)):
        yield f"redis+socket://{path}?virtual_host=0"
