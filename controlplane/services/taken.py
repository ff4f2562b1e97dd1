"""Refusing a name that is taken, without telling of what somebody may not see."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db.models import Model, QuerySet

from controlplane.access.asker import roles_of
from controlplane.access.scope import visible
from controlplane.errors import ConflictError, NameTakenError, NotUsableError


def taken(noun: str, value: str, holders: QuerySet[Model], by: User | None) -> ConflictError:
    """The refusal of a name or URL that one of ``holders`` has: who may see none of them is told only that it cannot
    be used.

    ``by`` is None where the system acts by itself.
    """
    shown = by is None or not holders.exists() or visible(roles_of(by), holders).exists()
    return NameTakenError(noun, value) if shown else NotUsableError(value)
