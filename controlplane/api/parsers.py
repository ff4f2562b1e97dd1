"""How a body is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import IO, Any

from rest_framework.exceptions import ParseError
from rest_framework.parsers import JSONParser

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
