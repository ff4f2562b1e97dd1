"""``If-Match``, and differences of JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from typing import Any

from rest_framework.request import Request

_TAG = re.compile(r'(W/)?("[^"]*")')
_ABSENT = object()
MAX_DIFFERENCES = 200  # in one response


def has_if_match(request: Request) -> bool:
    return "If-Match" in request.headers


def if_match_holds(request: Request, tag: str) -> bool:
    """Whether ``If-Match`` names this version, or any (``*``). Weak tags never match."""
    value = request.headers.get("If-Match", "")
    return value.strip() == "*" or any(not weak and listed == tag for weak, listed in _TAG.findall(value))


def differences(before: Any, after: Any) -> list[dict[str, Any]]:
    """``{"pointer", "before", "after"}`` for each different value, null for a missing one; at most 200.

    Lists of objects with names are compared by name, other lists as one value.
    """
    return list(islice(_differences(before, after, "#"), MAX_DIFFERENCES))


def _differences(before: Any, after: Any, path: str) -> Iterator[dict[str, Any]]:
    if before == after:
        return
    old, new = _members_by_name(before), _members_by_name(after)
    if old is None or new is None:
        yield {
            "pointer": path,
            "before": None if before is _ABSENT else before,
            "after": None if after is _ABSENT else after,
        }
        return
    for name in {**old, **new}:
        step = str(name).replace("~", "~0").replace("/", "~1")
        yield from _differences(old.get(name, _ABSENT), new.get(name, _ABSENT), f"{path}/{step}")


def _members_by_name(value: Any) -> dict[str, Any] | None:
    """The members of an object, or of a list of objects with names; None for anything else."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return {item["name"]: item for item in value}
    return None
