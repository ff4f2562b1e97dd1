"""Migrations can be run while everything serves (R22). What 0.1.0 begins with has no release before it."""

import pytest
from django.db import connection, migrations, models
from django.db.migrations.loader import MigrationLoader
from django.db.models import Index, Q, UniqueConstraint
from django.db.models.functions import Now

from controlplane.database.operations import AddFieldOnce, BuildIndex, BuildUnique
from tests.contracts.last_release import LAST_RELEASE
from tests.contracts.migration_rules import BIG, RULES, faults


def later_ones():
    loader = MigrationLoader(None)
    for (app, name), migration in sorted(loader.disk_migrations.items()):
        if app in LAST_RELEASE and name > LAST_RELEASE[app]:
            yield migration


def test_no_migration_after_the_first_release_keeps_anybody_waiting_or_breaks_the_release_before():
    found = [fault for migration in later_ones() for fault in faults(migration)]
    assert found == []


def with_operations(*operations, atomic=True):
    migration = migrations.Migration("9999_sample", "controlplane")
    migration.operations, migration.atomic = list(operations), atomic
    return list(faults(migration))


INDEX = Index(fields=["at"], name="x")
UNIQUE = UniqueConstraint(fields=["at"], name="x")
BAD = {
    "an index": migrations.AddIndex("event", INDEX),
    "a concurrent one in a transaction": BuildIndex("event", INDEX),
    "a constraint": migrations.AddConstraint("event", models.CheckConstraint(condition=Q(pk__gt=0), name="x")),
    "a unique constraint": migrations.AddConstraint("event", UNIQUE),
    "a concurrent one of these in a transaction": BuildUnique("event", UNIQUE),
    "a computed default": migrations.AddField("event", "x", models.DateTimeField(db_default=Now())),
    "a foreign key": migrations.AddField("event", "x", models.ForeignKey("x.Pool", models.CASCADE, null=True)),
    "a new type": migrations.AlterField("event", "x", models.BigIntegerField(null=True)),
    "statements": migrations.RunSQL("update controlplane_event set kind = kind"),
    "a column that must be given": migrations.AddField("pool", "x", models.IntegerField(default=1)),
    "a column that goes": migrations.RemoveField("pool", "x"),
    "a column with another name": migrations.RenameField("pool", "x", "y"),
    "a table that goes": migrations.DeleteModel("pool"),
}  # fmt: skip
GOOD = {
    "an index of a small table": (migrations.AddIndex("pool", INDEX), True),
    "a concurrent index": (BuildIndex("event", INDEX), False),
    "a concurrent unique index": (BuildUnique("event", UNIQUE), False),
    "a column that may be null": (migrations.AddField("event", "x", models.IntegerField(null=True)), True),
    "a constant default": (migrations.AddField("event", "x", models.IntegerField(db_default=0)), True),
    "a longer text": (migrations.AlterField("event", "x", models.CharField(max_length=900)), True),
    "statements that say why": (migrations.RunSQL("select 1", hints={"brief": "touches no table"}), True),
}  # fmt: skip


@pytest.mark.parametrize("operation", BAD.values(), ids=BAD)
def test_what_would_is_found(operation):
    assert with_operations(operation)


@pytest.mark.parametrize(("operation", "atomic"), GOOD.values(), ids=GOOD)
def test_what_would_not_is_left_alone(operation, atomic):
    assert with_operations(operation, atomic=atomic) == []


def test_what_a_later_failure_would_have_done_twice_is_found():
    add = {"model_name": "event", "name": "x", "field": models.IntegerField(null=True)}
    build = BuildIndex("event", INDEX)
    assert with_operations(migrations.AddField(**add), build, atomic=False)
    assert with_operations(AddFieldOnce(**add), build, atomic=False) == []


def test_every_rule_says_why():
    assert all(rule.__doc__ for rule in RULES)


@pytest.mark.django_db
def test_every_big_table_is_there():
    tables = {table.rpartition("_")[2] for table in connection.introspection.table_names()}
    assert tables >= BIG
