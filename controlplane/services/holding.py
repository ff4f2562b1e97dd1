"""Rows that a change is about, held until it is done."""

from __future__ import annotations

from typing import TypeVar

from django.db.models import Model, QuerySet

from controlplane.errors import GoneError

Row = TypeVar("Row", bound=Model)


def hold(rows: QuerySet[Row], pk: int) -> Row:
    """One of the rows, which the query locks; GoneError where somebody removed it since it was looked at."""
    found = rows.filter(pk=pk).first()
    if found is None:
        raise GoneError(str(rows.model._meta.verbose_name))  # noqa: SLF001 - Django's name
    return found
