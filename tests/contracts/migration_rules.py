"""Rules for migrations that run while all processes serve, and with which the previous release still works.

Each rule returns what is wrong with an operation, or None. A table is big if it grows with traffic or time: rewriting
it holds a lock for too long. Code of the previous release runs for a while after a migration: the columns it reads must
remain, and the rows it writes must be accepted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from django.contrib.postgres.operations import AddConstraintNotValid, AddIndexConcurrently
from django.db import migrations, models
from django.db.migrations.operations.base import Operation
from django.db.models import Value

BIG = frozenset(
    {
        "event",
        "auditentry",
        "configsnapshot",
        "routerreport",
        "reading",
        "routerreading",
        "decision",
        "notification",
        "deliveryattempt",
        "alert",
        "alerthistoryentry",
    }
)
Rule = Callable[[Operation], str | None]


def an_index_is_built_without_blocking_writers(operation: Operation) -> str | None:
    """``CREATE INDEX`` blocks writers; ``CONCURRENTLY`` does not."""
    if isinstance(operation, migrations.AddIndex) and not isinstance(operation, AddIndexConcurrently):
        return _on_big(operation.model_name, "build it by AddIndexConcurrently, in a migration of its own")
    return None


def a_constraint_is_checked_without_blocking_writers(operation: Operation) -> str | None:
    """``ADD CONSTRAINT`` reads every row under a lock; ``NOT VALID`` reads none."""
    if isinstance(operation, migrations.AddConstraint) and not isinstance(operation, AddConstraintNotValid):
        return _on_big(operation.model_name, "add it by AddConstraintNotValid and validate it in a later migration")
    return None


def a_column_is_added_without_touching_rows(operation: Operation) -> str | None:
    """A constant default is stored once; a computed one is written to every row under a lock."""
    if not isinstance(operation, migrations.AddField):
        return None
    field = operation.field
    if field.unique or field.db_index:  # a foreign key has an index
        return _on_big(operation.model_name, "add the column alone, and its index by AddIndexConcurrently")
    if field.has_db_default() and not isinstance(field.db_default, int | str | bool | float | Value):
        return _on_big(operation.model_name, "add it with a constant default, then alter the default")
    return None


def a_column_is_not_rewritten(operation: Operation) -> str | None:
    """Most type changes rewrite the table; a longer text or another default does not."""
    if isinstance(operation, migrations.AlterField) and not isinstance(
        operation.field, models.CharField | models.TextField
    ):
        return _on_big(operation.model_name, "add another column, fill it in batches, and drop the old one later")
    return None


def bulk_changes_state_why_they_do_not_block(operation: Operation) -> str | None:
    """Custom SQL or Python must state why it does not block."""
    if isinstance(operation, migrations.RunPython | migrations.RunSQL) and not operation.hints.get("brief"):
        return "set hints={'brief': 'why no lock is held for long'}"
    return None


def the_previous_release_can_still_write(operation: Operation) -> str | None:
    """The previous release does not name a new column in its ``INSERT``, so the column needs a default or must be
    nullable.
    """
    if isinstance(operation, migrations.AddField) and not (operation.field.null or operation.field.has_db_default()):
        many = isinstance(operation.field, models.ManyToManyField)
        return None if many else "give it db_default, or let it be null: the previous release leaves it out"
    return None


def the_previous_release_can_still_read(operation: Operation) -> str | None:
    """The previous release reads all its columns; remove a column one release after its last use."""
    removals = (migrations.RemoveField, migrations.RenameField, migrations.DeleteModel, migrations.RenameModel)
    if isinstance(operation, removals):
        return "remove it one release after the last release that uses it (SeparateDatabaseAndState)"
    return None


RULES: tuple[Rule, ...] = (
    an_index_is_built_without_blocking_writers,
    a_constraint_is_checked_without_blocking_writers,
    a_column_is_added_without_touching_rows,
    a_column_is_not_rewritten,
    bulk_changes_state_why_they_do_not_block,
    the_previous_release_can_still_write,
    the_previous_release_can_still_read,
)


def faults(migration: migrations.Migration) -> Iterator[str]:
    """Faults of a migration's operations."""
    created: set[str] = set()
    for operation in migration.operations:
        if isinstance(operation, migrations.CreateModel):
            created.add(operation.name.lower())
        elif getattr(operation, "model_name", "").lower() in created:
            continue  # a table that is new has no rows
        for rule in RULES:
            if fault := rule(operation):
                yield f"{migration.app_label}.{migration.name}: {operation.describe()}: {fault}"
        is_last = operation is migration.operations[-1]
        if not (migration.atomic or is_last):
            reason = "a retry would run it twice if a later operation fails"
            yield f"{migration.app_label}.{migration.name}: {operation.describe()}: {reason}"
        if isinstance(operation, AddIndexConcurrently) and migration.atomic:
            yield f"{migration.app_label}.{migration.name}: {operation.describe()}: needs atomic = False"


def _on_big(model_name: str, advice: str) -> str | None:
    return advice if model_name.lower() in BIG else None
