"""A partitioned table gets another primary key while it is in use (R22)."""

from datetime import timedelta

import pytest
from django.db import IntegrityError, connection, transaction

from telemetry.storage.partitions import ReplaceKey, ensure_days, partitions_of
from tests.telemetry.conftest import T0

TABLE = "telemetry_routerreading"
BEFORE = ("at", "router_id", "pool", "group", "replica", "policy", "revision")
OPERATION = ReplaceKey("routerreading", before=BEFORE, after=(*BEFORE, "reuse"))


def key_of(table):
    with connection.cursor() as cursor:
        return tuple(connection.introspection.get_primary_key_columns(cursor, table))


def add(reuse):
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            f"""insert into {TABLE} (at, router_id, pool, "group", replica, policy, revision, reuse, state)
            values (%s, 1, 'chat', '', '', '', 0, %s, 'ok')""",
            [T0, reuse],
        )


def run(direction):
    with connection.schema_editor(atomic=False) as editor:
        getattr(OPERATION, f"database_{direction}")("telemetry", editor, None, None)


@pytest.mark.django_db(transaction=True)
def test_the_key_of_every_partition_changes_and_changes_back():
    ensure_days([T0.date(), (T0 + timedelta(days=1)).date()])
    add("")
    add("hit")

    run("backwards")
    assert {key_of(table) for table in (TABLE, *partitions_of(TABLE))} == {BEFORE}
    with pytest.raises(IntegrityError):
        add("hit")  # the row that only the new key told apart is gone, and has no place

    run("forwards")
    ensure_days([(T0 + timedelta(days=2)).date()])
    assert {key_of(table) for table in (TABLE, *partitions_of(TABLE))} == {(*BEFORE, "reuse")}
    add("hit")
    with pytest.raises(IntegrityError):
        add("hit")
    run("forwards")  # again, as after being cut short
    assert len(partitions_of(TABLE)) >= 3
