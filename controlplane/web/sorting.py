"""Sorting tables by plain links: ``?sort=name``, or ``?sort=-name`` for the other way round."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from django.http import HttpRequest

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
