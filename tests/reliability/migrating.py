"""Migrations on tables with rows while other sessions read and write them."""

from __future__ import annotations

import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, Self

import psycopg

from tests.end_to_end.live_stack import ROOT, outside_pytest

MAX_WAIT_S = 1.0  # of any other session
NEXT_RELEASE = "tests.reliability.next_release.settings"
HOUR = "date_trunc('hour', now())"


class Table(NamedTuple):
    """A table that grows with traffic or time, and typical statements on it. ``insert_many`` takes a row count."""

    name: str
    insert_many: str
    write: str
    read: str


EVENTS = Table(
    "controlplane_event",
    "insert into controlplane_event (at, kind, summary, detail)"
    " select now(), 'router_lost', 'x', '{{}}' from generate_series(1, {rows})",
    "insert into controlplane_event (at, kind, summary, detail) values (now(), 'router_lost', 'x', '{}')",
    "select summary from controlplane_event order by at desc, id desc limit 50",
)
_KEY = 'at, router_id, pool, "group", replica, policy, revision, state, requests'
ROUTER_READINGS = Table(
    "telemetry_routerreading",
    f"insert into telemetry_routerreading ({_KEY}) select {HOUR} - n * interval '1 us', 1, 'p', 'g', 'r', 'y', 1, 'ok',"
    " 1 from generate_series(1, {rows}) n",
    f"insert into telemetry_routerreading ({_KEY}) values (clock_timestamp(), 2, 'p', 'g', 'r', 'y', 1, 'ok', 1)",
    "select sum(requests) from telemetry_routerreading where at > now() - interval '1 s'",
)
TABLES = (EVENTS, ROUTER_READINGS)


@contextmanager
def migrated_database(socket_dir: Path, folder: Path) -> Iterator[str]:
    """Name of a database that this release migrated."""
    name = f"migrated_{secrets.token_hex(4)}"
    with psycopg.connect(host=str(socket_dir), user="postgres", autocommit=True) as server:
        server.execute(f"create database {name}")
        migrate(url_of(socket_dir, name), folder, settings="controlplane.settings.dev")
        with psycopg.connect(url_of(socket_dir, name), autocommit=True) as database:
            database.execute(
                "create table if not exists telemetry_routerreading_all partition of telemetry_routerreading default"
            )
        yield name
        server.execute(f"drop database {name} with (force)")


@contextmanager
def database_copy(socket_dir: Path, database: str) -> Iterator[str]:
    """URL of a copy of a database."""
    name = f"migrating_{secrets.token_hex(4)}"
    with psycopg.connect(host=str(socket_dir), user="postgres", autocommit=True) as server:
        server.execute(f"create database {name} template {database}")
        yield url_of(socket_dir, name)
        server.execute(f"drop database {name} with (force)")


def url_of(socket_dir: Path, name: str) -> str:
    return f"postgresql://postgres@/{name}?host={socket_dir}"


def fill(database: str, rows: int) -> None:
    """Insert this many rows into each table."""
    with psycopg.connect(database, autocommit=True) as server:
        for table in TABLES:
            server.execute(table.insert_many.format(rows=rows))  # type: ignore[arg-type]  # not from outside
            server.execute(f"vacuum analyze {table.name}")  # type: ignore[arg-type]  # as above


def migrating(database: str, folder: Path, *, settings: str = NEXT_RELEASE) -> subprocess.Popen[str]:
    """Start ``manage.py migrate`` of the next release; it reports on standard error."""
    environment = {"DJANGO_SETTINGS_MODULE": settings, "WARMPATH_DATABASE_URL": database,
                   "WARMPATH_DATA_DIR": str(folder)}  # fmt: skip
    command = [sys.executable, "manage.py", "migrate", "--skip-checks"]  # of URLs and models, for a second
    return subprocess.Popen(
        command, cwd=ROOT, env=outside_pytest(environment), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )


def migrate(database: str, folder: Path, *, settings: str = NEXT_RELEASE, within_s: float = 250) -> None:
    """Run the migration to its end."""
    with migrating(database, folder, settings=settings) as process:
        _, errors = process.communicate(timeout=within_s)
    assert process.returncode == 0, errors


class TableUser:
    """Reads and writes one table until the end of the block; ``durations_s`` has the duration of each round."""

    def __init__(self, database: str, table: Table = EVENTS) -> None:
        self.table = table
        self.durations_s: list[float] = []
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
            while not self._done.wait(0.01):
                started = time.monotonic()
                server.execute(self.table.write)  # type: ignore[arg-type]  # not from outside
                server.execute(self.table.read).fetchall()  # type: ignore[arg-type]  # as above
                self.durations_s.append(time.monotonic() - started)
