"""R22: migrations run on tables with rows while others read and write, and keep nobody waiting for a second."""

import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import psycopg
import pytest

from tests.end_to_end.live_stack import ROOT, outside_pytest
from tests.reliability.stand import is_within

pytestmark = pytest.mark.timeout(300)
ROWS = 200_000
LONGEST_S = 1.0
BEFORE = ("controlplane", "0008")  # migrations after it run under load
EVENT = "insert into controlplane_event (at, kind, summary, detail) values (now(), 'router_lost', 'x', '{}')"


@pytest.fixture(scope="module")
def before(postgres: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A database as it was before the migrations that are tried here: its name, to be copied."""
    name = f"before_{secrets.token_hex(4)}"
    with psycopg.connect(host=str(postgres), user="postgres", autocommit=True) as server:
        server.execute(f"create database {name}")
        migrate(f"postgresql://postgres@/{name}?host={postgres}", tmp_path_factory.mktemp("before"), *BEFORE)
        yield name
        server.execute(f"drop database {name} with (force)")


@pytest.fixture
def database(postgres: Path, before: str) -> Iterator[str]:
    """The URL of a database as it was before."""
    name = f"migrating_{secrets.token_hex(4)}"
    with psycopg.connect(host=str(postgres), user="postgres", autocommit=True) as server:
        server.execute(f"create database {name} template {before}")
        yield f"postgresql://postgres@/{name}?host={postgres}"
        server.execute(f"drop database {name} with (force)")


def migrating(database: str, tmp_path: Path, *arguments: str) -> subprocess.Popen[str]:
    environment = {"DJANGO_SETTINGS_MODULE": "controlplane.settings.dev", "WARMPATH_DATABASE_URL": database,
                   "WARMPATH_DATA_DIR": str(tmp_path)}  # fmt: skip
    command = [sys.executable, "manage.py", "migrate", *arguments]
    return subprocess.Popen(
        command, cwd=ROOT, env=outside_pytest(environment), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def migrate(database: str, tmp_path: Path, *arguments: str) -> None:
    with migrating(database, tmp_path, *arguments) as process:
        _, said = process.communicate(timeout=250)
    assert process.returncode == 0, said


class Using:
    """Somebody who reads and writes events all the time, and how long each time took."""

    def __init__(self, database: str) -> None:
        self.took: list[float] = []
        self._database = database
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._use)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join(timeout=60)

    def _use(self) -> None:
        with psycopg.connect(self._database, autocommit=True) as server:
            while not self._done.is_set():
                begun = time.monotonic()
                server.execute(EVENT)
                server.execute("select summary from controlplane_event order by at desc, id desc limit 50").fetchall()
                self.took.append(time.monotonic() - begun)


def test_nobody_waits_for_a_second_while_tables_with_rows_are_migrated(database, tmp_path):
    with psycopg.connect(database, autocommit=True) as server:
        server.execute(EVENT.replace("values (", "select ").replace("'{}')", f"'{{}}' from generate_series(1, {ROWS})"))
    with Using(database) as user:
        migrate(database, tmp_path)
    assert len(user.took) > 20
    assert is_within(max(user.took), LONGEST_S)


def test_a_migration_waits_for_a_table_in_use_without_making_others_wait(database, tmp_path):
    with psycopg.connect(database, autocommit=True) as server:
        server.execute(EVENT)
    with Using(database) as user, psycopg.connect(database) as holder:
        holder.execute("select * from controlplane_event")  # a long report: its transaction goes on
        with migrating(database, tmp_path) as process:
            assert process.stderr.readline() == "A table is in use; trying again.\n"
            holder.rollback()
            _, said = process.communicate(timeout=100)
        assert process.returncode == 0, said
    assert is_within(max(user.took), LONGEST_S + 0.9)  # what the migration asked for
