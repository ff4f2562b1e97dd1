"""Pagination of lists, and the JSON parser."""

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

MAX_DEPTH = 64  # levels of JSON; valid bodies have at most four


class Pages(LimitOffsetPagination):
    """``?limit=&offset=`` for objects that people configure: at most 1000 rows a response."""

    default_limit = 100
    max_limit = 1000

    def paginate_queryset(self, queryset: QuerySet[Any], request: Request, view: Any = None) -> list[Any] | None:
        """One page. ValidationError for a limit or an offset that is not a number, where DRF would ignore it."""
        _check_numbers(request, "limit", "offset")
        return super().paginate_queryset(queryset, request, view)


class NewestFirst(CursorPagination):
    """``?cursor=`` for append-only rows: pages stay stable while rows are added. A subclass sets the ordering."""

    page_size = 100
    page_size_query_param = "limit"
    max_page_size = 1000

    def paginate_queryset(self, queryset: QuerySet[Any], request: Request, view: Any = None) -> list[Any] | None:
        """One page. NotFound for an invalid cursor."""
        _check_numbers(request, "limit")
        try:
            return super().paginate_queryset(queryset, request, view)
        except ValidationError:  # the cursor's position is not a value of the ordering's column
            raise NotFound(self.invalid_cursor_message) from None


def newest_first(*ordering: str) -> type[NewestFirst]:
    """Cursor pagination in this order, such as ``-id``."""
    return type("NewestFirstPages", (NewestFirst,), {"ordering": ordering})


def _check_numbers(request: Request, *names: str) -> None:
    for name in names:
        value = request.query_params.get(name, "0")
        if not (value.isascii() and value.isdigit() and len(value) < 19):
            raise serializers.ValidationError({name: ["Expected a whole number."]})


class ShallowJSONParser(JSONParser):
    """Rejects deeply nested JSON, which would exhaust the stack of recursive code. ParseError."""

    def parse(
        self, stream: IO[Any], media_type: str | None = None, parser_context: Mapping[str, Any] | None = None
    ) -> Any:
        error = ParseError(f"The JSON is nested deeper than {MAX_DEPTH} levels.")
        try:
            value = super().parse(stream, media_type, parser_context)
        except RecursionError:
            raise error from None
        level: list[Any] = [value]
        for _ in range(MAX_DEPTH + 1):
            level = [
                inner
                for outer in level
                if isinstance(outer, dict | list)
                for inner in (outer.values() if isinstance(outer, dict) else outer)
            ]
            if not level:
                return value
        raise error
