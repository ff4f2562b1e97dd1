"""A database of another history of the migrations is refused with what to do, before anything is changed."""

import pytest
from django.core.management import CommandError, call_command
from django.db import connection
from django.db.migrations.loader import MigrationLoader

from controlplane.database.schema_check import refuse_foreign_database, schema_fault
from controlplane.management.commands.migrate import migration_timeouts
from telemetry.models import Alert

pytestmark = pytest.mark.django_db


def execute(sql):
    with connection.cursor() as cursor:
        cursor.execute(sql)


def record(app, name):
    execute(f"insert into django_migrations (app, name, applied) values ('{app}', '{name}', now())")


def test_a_migrated_database_is_right_and_so_is_one_of_a_newer_release(client):
    record("telemetry", "9999_of_a_newer_release")

    assert schema_fault() is None
    assert client.get("/readyz").status_code == 200


def test_a_database_that_records_other_migrations_is_refused(capsys):
    record("controlplane", "0002_other_triggers")

    for refused in (lambda: call_command("migrate", verbosity=0), refuse_foreign_database):
        with pytest.raises((CommandError, SystemExit)) as error:
            refused()
        assert "another history of Warmpath: controlplane.0002_other_triggers." in str(error.value)
        assert "Nothing was changed." in str(error.value)
        assert "WARMPATH_DATABASE_URL" in str(error.value)


def test_a_database_of_all_replaced_migrations_is_right_and_one_of_some_is_refused(capsys):
    """Those of the development before the first release."""
    ours = {key: row for key, row in MigrationLoader(None).disk_migrations.items() if row.replaces}
    for app, name in ours:
        execute(f"delete from django_migrations where app = '{app}' and name = '{name}'")
    for app, name in (key for row in ours.values() for key in row.replaces):
        record(app, name)

    assert schema_fault() is None
    call_command("migrate", verbosity=1)
    assert "No migrations to apply" in capsys.readouterr().out

    execute("delete from django_migrations where name in ('0001_schema', '0002_triggers', '0002_partitions')")
    execute("delete from django_migrations where name in ('0024_rule_kind_choices', '0015_source_adoption')")
    with pytest.raises(CommandError, match=r"another history of Warmpath: controlplane\.0001_initial"):
        call_command("migrate", verbosity=0)


def test_a_database_with_equal_names_and_fewer_columns_is_refused(client, monkeypatch):
    """Migrations were edited under their names, so an older database has nothing to migrate and lacks columns."""
    execute("alter table telemetry_alert drop column notified_causes")
    execute("alter table controlplane_pool drop column adapters")

    assert "lacks 2 columns" in schema_fault()
    assert "controlplane_pool.adapters, telemetry_alert.notified_causes" in schema_fault()
    with pytest.raises(CommandError, match="lacks 2 columns"):
        call_command("migrate", verbosity=0)
    monkeypatch.setattr("controlplane.urls._is_schema_right", False)
    response = client.get("/readyz")
    assert (response.status_code, "lacks 2 columns" in response.json()["reason"]) == (503, True)


def test_every_column_of_the_models_is_checked():
    """The state of the migrations, which is compared, has the models' columns."""
    execute("alter table telemetry_alert drop column summary cascade")

    assert Alert._meta.get_field("summary").column in schema_fault()


def test_a_migration_may_compute_for_longer_than_a_request(db):
    """On a busy machine Django takes seconds between two statements of a migration."""

    def idle_timeout():
        with connection.cursor() as cursor:
            cursor.execute("show idle_in_transaction_session_timeout")
            return cursor.fetchone()[0]

    with connection.cursor() as cursor:
        cursor.execute("set idle_in_transaction_session_timeout to '4s'")
    with migration_timeouts(connection):
        during = idle_timeout()

    assert (during, idle_timeout() == during) == ("1min", False)
