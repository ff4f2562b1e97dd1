"""How lists are cut into pages.

How a body is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from django.core.exceptions import ValidationError
from django.db.models import QuerySet
from rest_framework import serializers
from rest_framework.exceptions import NotFound, ParseError
from rest_framework.pagination import CursorPagination, LimitOffsetPagination
from rest_framework.parsers import JSONParser
from rest_framework.request import Request


class Pages(LimitOffsetPagination):
    """``?limit=&offset=`` for sets that people keep: at most 1000 rows an answer."""

    default_limit = 100
    max_limit = 1000

    def paginate_queryset(self, queryset: QuerySet[Any], request: Request, view: Any = None) -> list[Any] | None:
        """One page; a ValidationError for a limit or an offset that is no number."""
        check_numbers(request, "limit", "offset")
        return super().paginate_queryset(queryset, request, view)


class NewestFirst(CursorPagination):
    """``?cursor=`` for sets that only grow: steady while new rows come in. Who inherits names the ordering."""

    page_size = 100
    page_size_query_param = "limit"
    max_page_size = 1000

    def paginate_queryset(self, queryset: QuerySet[Any], request: Request, view: Any = None) -> list[Any] | None:
        """One page; NotFound for a cursor that nobody was given."""
        check_numbers(request, "limit")
        try:
            return super().paginate_queryset(queryset, request, view)
        except ValidationError:  # its position is none that the rows are ordered by
            raise NotFound(self.invalid_cursor_message) from None


def check_numbers(request: Request, *names: str) -> None:
    """A ValidationError for one that is given and is no whole number, rather than a page that nobody asked for."""
    for name in names:
        given = request.query_params.get(name, "0")
        if not (given.isascii() and given.isdigit() and len(given) < 19):
            raise serializers.ValidationError({name: ["Expected a whole number."]})


class AuditPages(NewestFirst):
    """Entries of the audit log, the newest first."""

    ordering = ("-number",)


class RevisionPages(NewestFirst):
    """Revisions, the newest first."""

    ordering = ("-id",)


class RolloutPages(NewestFirst):
    """Rollouts, the newest first."""

    ordering = ("-started_at", "-id")


class EventPages(NewestFirst):
    """Events, the newest first."""

    ordering = ("-at", "-id")


class ConfigurationPages(NewestFirst):
    """Configurations, the newest first."""

    ordering = ("-number",)


MAX_DEPTH = 64  # what the API takes is at most four deep

_TOO_DEEP = f"The JSON is nested deeper than {MAX_DEPTH} levels."


class ShallowJSONParser(JSONParser):
    """JSON of a sane depth, so that nothing behind it runs out of stack; a ParseError for a deeper one."""

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        """The body's value."""
        try:
            value = super().parse(stream, media_type, parser_context)
        except RecursionError:
            raise ParseError(_TOO_DEEP) from None
        _check_depth(value)
        return value


def _check_depth(value: object) -> None:
    """Level by level, without recursion."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for outer in level if isinstance(outer, dict | list) for inner in _members(outer)]
        if not level:
            return
    raise ParseError(_TOO_DEEP)


def _members(value: dict[str, object] | list[object]) -> list[object]:
    return list(value.values()) if isinstance(value, dict) else value
