"""What will go: operations, and fields of what is sent or answered. Announced for two minor releases at least.

Whoever calls such an operation is told in headers: ``Deprecation`` (RFC 9745) since when, ``Sunset`` (RFC 8594) from
when on it may be gone, and a ``Link`` to the document that says what to do instead. Whoever sends such a field or
parameter is told so too; one that is merely answered is announced by the document alone, because nobody can tell who
reads it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, time
from typing import Any

from django.utils.http import http_date

MINORS = 2  # releases between the one that announces and the one that removes
DOCUMENT = "/api/v1/openapi.json"


@dataclass(frozen=True, slots=True)
class Deprecation:
    """One announcement. ValueError where it leaves scripts too little time."""

    operation: str  # as the document names it: "GET /api/v1/pools/{name}"
    instead: str  # what to do, in a sentence
    announced_in: str  # the release, "0.2"
    removed_in: str  # the first release that may be without it
    since: date
    sunset: date
    field: str = ""  # of the body, a parameter, or the answer; "": all of the operation

    def __post_init__(self) -> None:
        """Check that there is time."""
        (major, minor), (last_major, last_minor) = _release(self.announced_in), _release(self.removed_in)
        if last_major == major and last_minor < minor + MINORS:
            raise ValueError(
                f"{self.operation}: {self.removed_in} is less than {MINORS} releases after its announcement"
            )
        if last_major < major or self.sunset <= self.since:
            raise ValueError(f"{self.operation}: it would be gone before it is announced")

    def headers(self) -> dict[str, str]:
        """What tells callers."""
        return {
            "Deprecation": f"@{_timestamp(self.since)}",
            "Sunset": http_date(_timestamp(self.sunset)),
            "Link": f'<{DOCUMENT}>; rel="deprecation"; type="application/json"',
        }

    def matches(self, method: str, path: str, named: int) -> bool:
        """Whether a request is of this operation; ``named`` is how many parts of its address are parameters."""
        wanted, _, template = self.operation.partition(" ")
        if wanted != method or template.count("{") != named:
            return False
        return re.fullmatch(re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template)), path) is not None


# Nothing yet. The entry of something that went is taken away with it.
DEPRECATIONS: tuple[Deprecation, ...] = ()


def told(method: str, path: str, named: int, said: Collection[str]) -> dict[str, str]:
    """The headers for one request, which sent the fields and parameters ``said``; {} where nothing is to be told."""
    for one in DEPRECATIONS:
        if one.matches(method, path, named) and (not one.field or one.field in said):
            return one.headers()
    return {}


def mark(document: dict[str, Any]) -> None:
    """Say it in the OpenAPI document; KeyError for an operation or a field that it does not have."""
    for one in DEPRECATIONS:
        method, _, path = one.operation.partition(" ")
        operation = document["paths"][path][method.lower()]
        places = list(_places(document, operation, one.field)) if one.field else [operation]
        if not places:
            raise KeyError(f"{one.operation} has no {one.field}")
        for place in places:
            words = f"Deprecated since {one.announced_in}, gone in {one.removed_in} at the earliest: {one.instead}"
            place["deprecated"] = True
            place["description"] = "\n\n".join(filter(None, [place.get("description"), words]))
        if not one.field:
            _describe_headers(operation)


def _places(document: dict[str, Any], operation: Mapping[str, Any], field: str) -> Iterator[dict[str, Any]]:
    """Where an operation's parameter or field is described."""
    yield from (one for one in operation.get("parameters", ()) if one["name"] == field)
    answers = [answer for status, answer in operation["responses"].items() if status.startswith("2")]
    for described in (operation.get("requestBody", {}), *answers):
        for content in described.get("content", {}).values():
            for component in _components(document, content.get("schema", {})):
                if field in component.get("properties", {}):
                    yield component["properties"][field]


def _components(document: dict[str, Any], schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The objects that a body or an answer is, or lists."""
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    yield schema
    for key in ("anyOf", "oneOf", "allOf"):
        for branch in schema.get(key, ()):
            yield from _components(document, branch)
    results = schema.get("properties", {}).get("results", schema)
    if "items" in results:
        yield from _components(document, results["items"])


def _describe_headers(operation: dict[str, Any]) -> None:
    text = {"schema": {"type": "string"}}
    headers = {
        "Deprecation": {"description": "Since when, as `@` and seconds since 1970.", **text},
        "Sunset": {"description": "From when on it may be gone.", **text},
        "Link": {"description": "What says what to do instead.", **text},
    }
    for status, answer in operation["responses"].items():
        if status.startswith("2"):
            answer["headers"] = {**answer.get("headers", {}), **headers}


def _release(text: str) -> tuple[int, int]:
    major, minor = text.split(".")
    return int(major), int(minor)


def _timestamp(day: date) -> int:
    return int(datetime.combine(day, time(), UTC).timestamp())
