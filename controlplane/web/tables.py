"""Paging by plain links: from the last one that was shown, so that what comes in meanwhile moves nothing.

Sorting tables by plain links: ``?sort=name``, or ``?sort=-name`` for the other way round.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, TypeVar

from django.db.models import Q
from django.http import HttpRequest

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def int_parameter(request: HttpRequest, param: str) -> int | None:
    """A number in the address; None where there is none, or something that is no number of ours."""
    text = request.GET.get(param, "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 19 else None


def cursor_after(row: Any) -> str:
    """Where a list by ``-at``, ``-pk`` goes on after this row."""
    return f"{(row.at - _EPOCH) // timedelta(microseconds=1)}-{row.pk}"


def beyond(cursor: str) -> Q | None:
    """The rows after a place in such a list; None for a text that is no place."""
    moment, _, number = cursor.partition("-")
    if not all(part.isascii() and part.isdigit() and len(part) < 19 for part in (moment, number)):
        return None
    try:
        at = _EPOCH + timedelta(microseconds=int(moment))
    except OverflowError:
        return None
    return Q(at__lte=at) & (Q(at__lt=at) | Q(pk__lt=int(number)))


Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Sort:
    """A column and a direction."""

    key: str
    descending: bool = False

    def apply(self, rows: Iterable[Row]) -> list[Row]:
        """The rows in order; those whose value is unknown come last in either direction."""
        known: list[Row] = []
        unknown: list[Row] = []
        for row in rows:
            (unknown if getattr(row, self.key) is None else known).append(row)
        known.sort(key=self._value, reverse=self.descending)
        return known + unknown

    def _value(self, row: Any) -> Any:
        value = getattr(row, self.key)
        return value.lower() if isinstance(value, str) else value


def asked_sort(request: HttpRequest, keys: Sequence[str], *, param: str = "sort") -> Sort:
    """The sort that a request names; the first key where it names none, or one nobody knows."""
    asked = request.GET.get(param, "")
    key = asked.removeprefix("-")
    return Sort(key, descending=asked.startswith("-")) if key in keys else Sort(keys[0])
