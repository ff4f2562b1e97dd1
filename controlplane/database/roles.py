"""Privileges of the application's database role.

Theory of operation. The owner role owns every table and runs migrations; processes connect with an application role
that may only read and write rows. In the audit log it may only read and insert, and delete what is older than 90 days
by a function of the owner's: it owns neither the table nor the
trigger, so it can neither change an entry nor disable the trigger. It owns the partitioned tables of readings, because
it creates and drops their daily partitions. Without an owner URL the application role owns everything, and only the
trigger and the hash chain protect the audit log.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.conf import settings
from django.db import DEFAULT_DB_ALIAS, connection, connections
from psycopg import sql

AUDIT_TABLE = "controlplane_auditentry"
READ_ONLY_TABLES = ("django_migrations",)

PARTITIONED_TABLES_QUERY = """
select c.oid::regclass::text from pg_class c join pg_namespace n on n.oid = c.relnamespace
where n.nspname = current_schema() and (c.relkind = 'p' or c.relispartition) and c.relkind in ('p', 'r')
    and pg_get_userbyid(c.relowner) <> %s
"""


@contextmanager
def owner_connection() -> Iterator[str | None]:
    """Connect as the owner inside the block; yields the application role's name, or None without an owner."""
    owner = settings.DATABASE_OWNER
    if not owner:
        yield None
        return
    application = connections.settings[DEFAULT_DB_ALIAS]
    _connect_as({**application, **owner})
    try:
        yield str(application["USER"])
    finally:
        _connect_as(application)


def grant_application(role: str) -> None:
    """Grant the application role what it needs and revoke the rest; run by the owner after migrations. Idempotent.

    Creates a missing role if the owner may, without a password, as on the local stack.
    """
    name = sql.Identifier(role)
    with connection.cursor() as cursor:
        cursor.execute("select 1 from pg_roles where rolname = %s", [role])
        if cursor.fetchone() is None:
            cursor.execute(sql.SQL("create role {} login").format(name))
        for statement in (
            "grant usage, create on schema public to {role}",
            "grant select, insert, update, delete on all tables in schema public to {role}",
            "grant usage, select, update on all sequences in schema public to {role}",
            "revoke all on {audit} from public, {role}",
            "grant select, insert on {audit} to {role}",
            "grant execute on function controlplane_expire_audit(bigint) to {role}",
            *(f"revoke insert, update, delete on {table} from {{role}}" for table in READ_ONLY_TABLES),
        ):
            cursor.execute(sql.SQL(statement).format(role=name, audit=sql.Identifier(AUDIT_TABLE)))
        cursor.execute(PARTITIONED_TABLES_QUERY, [role])
        for (table,) in cursor.fetchall():
            cursor.execute(sql.SQL("alter table {} owner to {}").format(sql.SQL(table), name))


def can_alter_audit() -> bool:
    """Whether this process's role could change the audit log, as its owner or by a grant."""
    with connection.cursor() as cursor:
        cursor.execute(
            "select pg_has_role(c.relowner, 'member')"
            " or has_table_privilege(c.oid, 'update, delete, truncate, trigger')"
            " from pg_class c where c.oid = %s::regclass",
            [AUDIT_TABLE],
        )
        return bool(cursor.fetchone()[0])


def _connect_as(database: dict[str, object]) -> None:
    current: Any = connections[DEFAULT_DB_ALIAS]
    current.close()
    current.close_pool()  # the pool belongs to the alias, not to the connection
    connections.settings[DEFAULT_DB_ALIAS] = database
    del connections[DEFAULT_DB_ALIAS]
