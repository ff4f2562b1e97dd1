"""Servers that tests share: PostgreSQL and Valkey, started on first use."""

import gc
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hypothesis
import pytest
from hypothesis import is_hypothesis_test

from controlplane.stack.paths import Child
from controlplane.stack.servers import EmbeddedPostgres, valkey_child
from tests.pace import ALL_EXAMPLES, with_fewer_examples
from tests.side_by_side import (  # noqa: F401 - hooks
    pytest_collection_modifyitems,
    pytest_runtest_protocol,
    pytest_xdist_make_scheduler,
)

START_DEADLINE_S = 90
FLUSH_ATTEMPTS = 5
KEPT_TABLES = {"django_content_type", "auth_permission"}  # depend on the models alone
# Truncating a table creates files anew, for its indexes as well, so small tables have their rows deleted. A partitioned
# table has no size of its own. As a replica, the server checks no foreign key and fires no trigger.
EMPTY_TABLES = """
do $$
declare
    name text;
    has_rows boolean;
begin
    set local session_replication_role = replica;
    set local client_min_messages = warning;
    foreach name in array array{tables} loop
        execute format('select exists (select from %I)', name) into has_rows;
        if has_rows and pg_relation_size(name::regclass) between 1 and 262144 then
            execute format('delete from %I', name);
        elsif has_rows then
            execute format('truncate %I cascade', name);
        end if;
    end loop;
end $$
"""

# The duration of an example depends on the machine; pytest limits each test as a whole.
hypothesis.settings.register_profile("any_machine", hypothesis.settings(), deadline=None)
hypothesis.settings.load_profile("any_machine")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Run fewer generated examples; all of them in ``make test-full``."""
    if ALL_EXAMPLES in os.environ or not is_hypothesis_test(item.obj):
        return
    owner, name = (item.cls, "settings") if item.cls else (item.obj, "_hypothesis_internal_use_settings")
    if not hasattr(owner, "is_with_fewer_examples"):  # each case of a parametrized test is collected
        owner.is_with_fewer_examples = True
        setattr(owner, name, with_fewer_examples(getattr(owner, name)))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    """Freeze collected objects, so that garbage collection does not traverse thousands of tests again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def quick_flush() -> Iterator[None]:
    """Empty the tables after a transactional test with ``EMPTY_TABLES`` instead of Django's ``flush``."""
    from django.test import TransactionTestCase

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionTestCase, "_fixture_teardown", lambda _case: empty_tables())
        yield


def empty_tables() -> None:
    """Empty the tables; retry after a deadlock with a request that a closed browser left running."""
    from django.db import OperationalError, connection, transaction

    names = connection.introspection.django_table_names(only_existing=True, include_views=False)
    tables = sorted(set(names) - KEPT_TABLES)
    for attempt in range(1, FLUSH_ATTEMPTS + 1):
        try:
            with transaction.atomic(), connection.cursor() as cursor:
                cursor.execute(f"lock table {', '.join(tables)} in access exclusive mode")
                cursor.execute(EMPTY_TABLES.format(tables=tables))
        except OperationalError:
            if attempt == FLUSH_ATTEMPTS:
                raise
        else:
            return


@pytest.fixture(scope="module")
def once_for_module(request, django_db_setup, django_db_blocker) -> Iterator[Callable]:
    """Calls a function that stores rows which all tests of a module share; returns what it returns.

    The transaction of each test becomes a savepoint in the transaction of these rows, so its changes end with it. Give
    each test a deep copy of the objects. The rows age while the module's tests run.
    """
    for item in request.session.items:
        marker = item.get_closest_marker("django_db") if item.path == request.path else None
        assert marker is None or not marker.kwargs.get("transaction"), f"{item.nodeid} would not see these rows stored"
    with django_db_blocker.unblock(), _rolled_back_transaction(), django_db_blocker.block():

        def call(function, *arguments):
            with django_db_blocker.unblock():
                return function(*arguments)

        yield call


@contextmanager
def _rolled_back_transaction() -> Iterator[None]:
    """A transaction that Django takes for that of a test, so that durable blocks may start in it."""
    from django.db import transaction

    block = transaction.atomic()
    block._from_testcase = True
    with block:
        yield
        transaction.set_rollback(True)


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
