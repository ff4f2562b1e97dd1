"""With the documented database roles, the application serves and cannot alter the audit log."""

import os
import re
import secrets
import subprocess
import sys

import psycopg
import pytest

from tests.contracts.documents.reading import ROOT

SQL = re.search(r"```sql\n(.*?)```", (ROOT / "deploy/README.md").read_text(), re.DOTALL)[1]
pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def application_environment(postgres):
    """Creates the documented roles under unique names; the environment of the application's processes."""
    tag = secrets.token_hex(4)
    owner, application = f"owner_{tag}", f"app_{tag}"
    names = {"warmpath_owner": owner, "warmpath": application}
    statements = re.sub(r"\bwarmpath(_owner)?\b", lambda match: names[match[0]], SQL).strip().split(";\n")
    with psycopg.connect(host=str(postgres), user="postgres", autocommit=True) as server:
        for statement in statements:
            server.execute(statement)
    variables = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "controlplane.settings.production",
        "WARMPATH_SECRET_KEY": secrets.token_urlsafe(48),
        "WARMPATH_ROUTER_ADMIN_TOKEN": secrets.token_urlsafe(32),
        "WARMPATH_ALLOWED_HOSTS": "127.0.0.1",
        "WARMPATH_DATABASE_URL": f"postgresql://{application}@/{application}?host={postgres}",
        "WARMPATH_REDIS_URL": "redis://127.0.0.1:1/0",
    }
    as_owner = variables | {"WARMPATH_DATABASE_OWNER_URL": f"postgresql://{owner}@/{application}?host={postgres}"}
    run_in_django(*[MANAGE.format("migrate")] * 2, environment=as_owner)  # twice, as after an upgrade
    yield variables
    with psycopg.connect(host=str(postgres), user="postgres", autocommit=True) as server:
        server.execute(f"drop database {application} with (force)")
        server.execute(f"drop role {owner}")
        server.execute(f"drop role {application}")


MANAGE = "call_command({!r})"
CAN_ALTER_AUDIT = "print('can alter:', can_alter_audit())"


def run_in_django(*statements, environment):
    """Run statements in one process, which takes seconds to start; return its output."""
    imports = (
        "import django; django.setup(); from django.core.management import call_command;"
        " from controlplane.database.roles import can_alter_audit"
    )
    result = subprocess.run(
        [sys.executable, "-c", "; ".join([imports, *statements])],
        check=False,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def application(application_environment):
    """A connection with the application's role; rolled back after the test."""
    with psycopg.connect(application_environment["WARMPATH_DATABASE_URL"]) as connection:
        yield connection
        connection.rollback()


def test_the_application_serves_with_its_own_role_and_knows_that_it_cannot_alter_the_log(application_environment):
    output = run_in_django(
        "call_command('seed_fleet', '--replica', 'http://127.0.0.1:9101')",
        MANAGE.format("maintain_partitions"),
        MANAGE.format("verify_audit"),
        CAN_ALTER_AUDIT,
        environment=application_environment,
    )
    assert "verified" in output
    assert "can alter: False" in output


@pytest.mark.parametrize(
    "statement",
    [
        "update controlplane_auditentry set summary = 'nothing happened'",
        "delete from controlplane_auditentry",
        "truncate controlplane_auditentry",
        "truncate controlplane_auditentry cascade",
        "alter table controlplane_auditentry disable trigger all",
        "drop trigger audit_append_only on controlplane_auditentry",
        "create trigger silent before insert on controlplane_auditentry for each row"
        " execute function controlplane_refuse_change('x')",
        "create rule silent as on insert to controlplane_auditentry do instead nothing",
        "alter table controlplane_auditentry owner to current_user",
        "grant all on controlplane_auditentry to current_user; delete from controlplane_auditentry",
        "drop table controlplane_auditentry",
        "drop schema public cascade",
        "set session_replication_role = replica",
        "create or replace function controlplane_refuse_change() returns trigger language plpgsql as"
        " $$ begin return new; end $$",
        "delete from django_migrations",
    ],
)
def test_the_applications_role_cannot_touch_the_audit_log(application, statement):
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        application.execute(statement)


def test_the_application_reads_and_appends_to_the_audit_log(application):
    columns = "number, at, kind, actor, token, address, request_id, project, pool, summary, reason, previous, digest"
    values = "999999, now(), 'x', '', '', '', '', '', '', 'x', '', '', ''"
    application.execute(f"insert into controlplane_auditentry ({columns}) values ({values})")
    assert application.execute("select count(*) from controlplane_auditentry").fetchone()[0] >= 1
    application.execute("update auth_user set first_name = 'x'")
    application.execute("create table telemetry_reading_29990101 (like telemetry_reading including all)")
    application.execute(
        "alter table telemetry_reading attach partition telemetry_reading_29990101"
        " for values from ('2999-01-01') to ('2999-01-02')"
    )


def test_the_site_knows_that_its_role_can_alter_the_log(application_environment):
    as_owner = application_environment["WARMPATH_DATABASE_URL"].replace("//app_", "//owner_", 1)
    variables = application_environment | {"WARMPATH_DATABASE_URL": as_owner}
    assert "can alter: True" in run_in_django(CAN_ALTER_AUDIT, environment=variables)
