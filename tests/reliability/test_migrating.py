"""Migrations run on tables with rows while other sessions read and write, and block none of them for a second.

At full size: ``python -m tests.benchmarks soak --only migrations --full``.
"""

from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.pace import is_within
from tests.reliability.migrating import (
    EVENTS,
    MAX_WAIT_S,
    ROUTER_READINGS,
    TABLES,
    TableUser,
    database_copy,
    fill,
    migrate,
    migrating,
)

ROWS = 100_000


@pytest.fixture
def database(postgres: Path, migrated: str) -> Iterator[str]:
    """URL of a migrated database."""
    with database_copy(postgres, migrated) as url:
        yield url


def test_no_session_waits_for_a_second_while_tables_with_rows_are_migrated(database, tmp_path):
    fill(database, ROWS)
    with TableUser(database, EVENTS) as events, TableUser(database, ROUTER_READINGS) as readings:
        migrate(database, tmp_path)
    for user in (events, readings):
        assert len(user.durations_s) > 20
        assert is_within(max(user.durations_s), MAX_WAIT_S)


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_a_migration_waits_for_a_table_in_use_without_making_others_wait(database, tmp_path, table):
    """A retry repeats steps that already succeeded, also outside a transaction."""
    with TableUser(database, table) as user, psycopg.connect(database) as holder:
        holder.execute(f"select * from {table.name}")  # a long report, whose transaction stays open
        with migrating(database, tmp_path) as process:
            assert process.stderr.readline() == "A table is in use; trying again.\n"
            holder.rollback()
            _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors
    assert is_within(max(user.durations_s), MAX_WAIT_S + 0.9)  # the lock timeout of the migration
