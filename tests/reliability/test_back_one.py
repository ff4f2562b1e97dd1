"""R22, back one: code of before a migration reads and writes what is there after it.

A release may be taken back without its migrations, and while it comes into force processes of both run. So whatever a
migration does must leave the old columns where they were, and take rows that do not name the new ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psycopg
import pytest
from django.apps import apps
from django.db import connection, models
from django.db.migrations.loader import MigrationLoader
from django.utils import timezone

from controlplane.services.policies.lifecycle import publish_revision, save_draft
from tests.alert_history import alerts_of_every_state
from tests.contracts.last_release import LAST_RELEASE
from tests.fleet_history import rollouts_of_every_kind, sources_at_work, warm_fleet
from tests.reliability.migrating import copied, migrate, url_of

MOST_ROWS = 5  # of each table: each differs in what is null
WIDER = {
    ("smallint", "integer"),
    ("smallint", "bigint"),
    ("integer", "bigint"),
    ("character varying", "text"),
    ("real", "double precision"),
}
# Constraints that are new on tables of the last release: what its code writes must keep them, and why it does.
KEPT = {
    "alert_one_open_subject": "in the place of alert_one_open it allows more: an open alert for each subject of a pool",
}


class Column(NamedTuple):
    """One, as PostgreSQL knows it."""

    type: str
    length: int | None
    may_be_null: bool
    has_default: bool


# --- what PostgreSQL was told, since the last release -------------------------------------------------------


@pytest.fixture(scope="module")
def database(postgres: Path, earlier: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a database as the last release left it."""
    with copied(postgres, earlier) as url:
        for app, newest in LAST_RELEASE.items():
            migrate(url, tmp_path_factory.mktemp("released"), app, newest)
        yield url


def columns(database: str) -> dict[tuple[str, str], Column]:
    with psycopg.connect(database) as server:
        rows = server.execute("""
            select table_name, column_name, data_type, character_maximum_length, is_nullable = 'YES',
                   column_default is not null or is_identity = 'YES'
            from information_schema.columns join pg_class on oid = to_regclass(quote_ident(table_name))
            where table_name ~ '^(controlplane|telemetry)_' and not relispartition
        """).fetchall()
    return {(table, name): Column(*rest) for table, name, *rest in rows}


def constraints(database: str) -> dict[str, set[tuple[str, str]]]:
    """What refuses rows, by name: the columns that each looks at."""
    with psycopg.connect(database) as server:
        rows = server.execute("""
            with named as (
                select conname name, conrelid relation, conkey columns from pg_constraint
                where contype in ('c', 'f', 'x')
                union select indexrelid::regclass::text, indrelid, indkey::int2[] from pg_index where indisunique
            )
            select name, relname, attname from named join pg_class on pg_class.oid = relation
            join pg_attribute on attrelid = relation and attnum = any(columns)
            where relname ~ '^(controlplane|telemetry)_' and not relispartition
        """).fetchall()
    found: dict[str, set[tuple[str, str]]] = defaultdict(set)
    for name, table, column in rows:
        found[name].add((table, column))
    return found


def faults(before: dict[tuple[str, str], Column], after: dict[tuple[str, str], Column]) -> Iterator[str]:
    """What code that knows the columns of before cannot live with."""
    tables = {table for table, _ in before}
    for (table, name), old in before.items():
        new = after.get((table, name))
        if new is None:
            yield f"{table}.{name} is gone"
            continue
        if old.type != new.type and (old.type, new.type) not in WIDER:
            yield f"{table}.{name} was {old.type} and is {new.type}"
        if new.length is not None and (old.length is None or new.length < old.length):
            yield f"{table}.{name} takes {new.length} characters, no more {old.length}"
        if old.may_be_null and not new.may_be_null:
            yield f"{table}.{name} may no longer be null"
        if old.has_default and not new.has_default and not new.may_be_null:
            yield f"{table}.{name} has no default any more"
    for (table, name), new in after.items():
        if table in tables and (table, name) not in before and not (new.may_be_null or new.has_default):
            yield f"{table}.{name} is new and must be given"


def test_the_last_release_finds_its_columns_and_need_not_name_newer_ones(db, postgres, database):
    before, held_before = columns(database), constraints(database)
    now = url_of(postgres, connection.settings_dict["NAME"])
    assert list(faults(before, columns(now))) == []
    fresh = {name: looks_at for name, looks_at in constraints(now).items() if name not in held_before}
    tighter = {name for name, looks_at in fresh.items() if looks_at & before.keys()}  # others see defaults alone
    assert tighter == set(KEPT), "say in KEPT why what the last release writes keeps them"


TEXT = Column("character varying", 20, may_be_null=False, has_default=False)
OLD = {("pool", "name"): TEXT, ("pool", "note"): Column("text", None, may_be_null=True, has_default=False)}
BAD = {
    "a column that is gone": {("pool", "name"): TEXT},
    "a shorter one": OLD | {("pool", "name"): TEXT._replace(length=10)},
    "another type": OLD | {("pool", "name"): TEXT._replace(type="integer", length=None)},
    "one that must be given now": OLD | {("pool", "note"): OLD["pool", "note"]._replace(may_be_null=False)},
    "a new one that must be given": OLD | {("pool", "new"): TEXT},
}  # fmt: skip
GOOD = {
    "a longer one": OLD | {("pool", "name"): TEXT._replace(length=30)},
    "a wider type": OLD | {("pool", "name"): TEXT._replace(type="text", length=None)},
    "a new one with a default": OLD | {("pool", "new"): TEXT._replace(has_default=True)},
    "a new table": OLD | {("other", "new"): TEXT},
}


@pytest.mark.parametrize("after", BAD.values(), ids=BAD)
def test_what_older_code_cannot_live_with_is_found(after):
    assert len(list(faults(OLD, after))) == 1


@pytest.mark.parametrize("after", GOOD.values(), ids=GOOD)
def test_what_it_can_live_with_is_not(after):
    assert list(faults(OLD, after)) == []


# --- the models of before the newest migration --------------------------------------------------------------


@pytest.fixture
def rows(db, django_user_model):
    """Something in most tables, written by the code of today."""
    now, operator = timezone.now(), django_user_model.objects.create_user("olga", is_superuser=True)
    pool = warm_fleet(now, seconds=60, by=operator)
    sources_at_work(pool, now)
    alerts_of_every_state(pool, operator)
    policy = pool.policies.get(group=None)
    publish_revision(save_draft(policy, {"strategy": "least_load"}).pk)
    rollouts_of_every_kind(policy, operator)


@pytest.mark.parametrize("app", LAST_RELEASE)
def test_the_models_of_before_the_newest_migration_read_and_write_its_tables(rows, app):
    loader = MigrationLoader(connection)
    (newest,) = loader.graph.leaf_nodes(app)
    before = [node.key for node in loader.graph.node_map[newest].parents if node.key[0] == app]
    tried = set()
    with connection.cursor() as cursor:
        cursor.execute("set local session_replication_role = replica")  # what is frozen may be written anew here
    for model in loader.project_state(before).apps.get_models():
        if model._meta.app_label == app and model._meta.managed:
            for row in list(model._base_manager.all()[:MOST_ROWS]):
                write_anew(model, row)
                tried.add(model._meta.model_name)
    have_rows = {it._meta.model_name for it in apps.get_app_config(app).get_models() if it._base_manager.exists()}
    assert len(tried) >= 8
    assert tried <= have_rows


def write_anew(model: type[models.Model], row: models.Model) -> None:
    """Change nothing about a row but that older code wrote it: an update of every column, then another insert."""
    same = model._base_manager.filter(pk=row.pk)
    names = [field.attname for field in model._meta.concrete_fields]
    before = same.values(*names).get()
    row.save(force_update=True)
    assert same._raw_delete("default") == 1
    model._base_manager.bulk_create([row])
    after = same.values(*names).get()
    changed = {field.attname for field in model._meta.concrete_fields if after[field.attname] != before[field.attname]}
    assert changed <= {field.attname for field in model._meta.concrete_fields if is_set_by_django(field)}


def is_set_by_django(field: models.Field) -> bool:
    """Whether it is the moment of a write."""
    return bool(getattr(field, "auto_now", False) or getattr(field, "auto_now_add", False))
