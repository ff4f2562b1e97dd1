"""A database of another history of the migrations is refused with what to do, before anything is changed."""

import pytest
from django.core.management import CommandError, call_command
from django.db import connection

from controlplane.database.schema_check import refuse_foreign_database, schema_fault
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
