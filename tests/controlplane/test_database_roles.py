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
    manage("migrate", environment=as_owner)
    manage("migrate", environment=as_owner)  # again, as after an upgrade
    yield variables
    with psycopg.connect(host=str(postgres), user="postgres", autocommit=True) as server:
        server.execute(f"drop database {application} with (force)")
        server.execute(f"drop role {owner}")
        server.execute(f"drop role {application}")


def manage(*arguments, environment):
    result = subprocess.run(
        [sys.executable, "manage.py", *arguments],
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


def test_the_application_serves_with_its_own_role(application_environment):
    manage("seed_fleet", "--replica", "http://127.0.0.1:9101", environment=application_environment)
    manage("maintain_partitions", environment=application_environment)
    assert "verified" in manage("verify_audit", environment=application_environment)


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


def test_the_site_knows_whether_its_role_can_alter_the_log(application_environment):
    code = "import django; django.setup(); from controlplane.database.roles import can_alter_audit as c; print(c())"
    for url, expected in (
        (application_environment["WARMPATH_DATABASE_URL"], "False"),
        (owner_url(application_environment), "True"),
    ):
        variables = application_environment | {"WARMPATH_DATABASE_URL": url}
        result = subprocess.run(
            [sys.executable, "-c", code],
            check=False,
            cwd=ROOT,
            env=variables,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert result.stdout.strip() == expected, result.stderr


def owner_url(environment):
    return environment["WARMPATH_DATABASE_URL"].replace("//app_", "//owner_", 1)
