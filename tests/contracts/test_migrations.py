"""Migrations after the first release run while all processes serve, and the previous release still works."""

import pytest
from django.contrib.postgres.operations import AddIndexConcurrently
from django.db import connection, migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.models import Index, Q, UniqueConstraint
from django.db.models.functions import Now

from tests.contracts.migration_rules import BIG, RULES, faults

LAST_RELEASE = {"controlplane": "0002_triggers", "telemetry": "0002_partitions"}  # its newest migrations: 0.1.0


def test_no_migration_after_the_last_release_blocks_writers_or_breaks_that_release():
    later = [
        migration
        for (app, name), migration in sorted(MigrationLoader(None).disk_migrations.items())
        if app in LAST_RELEASE and name > LAST_RELEASE[app]
    ]
    assert [fault for migration in later for fault in faults(migration)] == []


def with_operations(*operations, atomic=True):
    migration = migrations.Migration("9999_sample", "controlplane")
    migration.operations, migration.atomic = list(operations), atomic
    return list(faults(migration))


INDEX = Index(fields=["at"], name="x")
UNIQUE = UniqueConstraint(fields=["at"], name="x")
CONCURRENT = AddIndexConcurrently("event", INDEX)
NULLABLE = migrations.AddField("event", "x", models.IntegerField(null=True))
BAD = {
    "an index": migrations.AddIndex("event", INDEX),
    "a concurrent index in a transaction": CONCURRENT,
    "a constraint": migrations.AddConstraint("event", models.CheckConstraint(condition=Q(pk__gt=0), name="x")),
    "a unique constraint": migrations.AddConstraint("event", UNIQUE),
    "a computed default": migrations.AddField("event", "x", models.DateTimeField(db_default=Now())),
    "a foreign key": migrations.AddField("event", "x", models.ForeignKey("x.Pool", models.CASCADE, null=True)),
    "a new type": migrations.AlterField("event", "x", models.BigIntegerField(null=True)),
    "statements": migrations.RunSQL("update controlplane_event set kind = kind"),
    "a required column": migrations.AddField("pool", "x", models.IntegerField(default=1)),
    "a removed column": migrations.RemoveField("pool", "x"),
    "a renamed column": migrations.RenameField("pool", "x", "y"),
    "a removed table": migrations.DeleteModel("pool"),
}  # fmt: skip
GOOD = {
    "an index of a small table": (migrations.AddIndex("pool", INDEX), True),
    "a concurrent index": (CONCURRENT, False),
    "a nullable column": (NULLABLE, True),
    "a constant default": (migrations.AddField("event", "x", models.IntegerField(db_default=0)), True),
    "a longer text": (migrations.AlterField("event", "x", models.CharField(max_length=900)), True),
    "statements with a reason": (migrations.RunSQL("select 1", hints={"brief": "touches no table"}), True),
}  # fmt: skip


@pytest.mark.parametrize("operation", BAD.values(), ids=BAD)
def test_operations_that_block_or_break_the_previous_release_are_reported(operation):
    assert with_operations(operation)


@pytest.mark.parametrize(("operation", "atomic"), GOOD.values(), ids=GOOD)
def test_harmless_operations_are_accepted(operation, atomic):
    assert with_operations(operation, atomic=atomic) == []


def test_an_operation_that_a_retry_would_run_twice_is_reported():
    assert with_operations(NULLABLE, CONCURRENT, atomic=False)


def test_every_rule_states_its_reason():
    assert all(rule.__doc__ for rule in RULES)


@pytest.mark.django_db
def test_every_big_table_exists():
    tables = {table.rpartition("_")[2] for table in connection.introspection.table_names()}
    assert tables >= BIG
