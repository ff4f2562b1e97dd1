"""What differs between two JSON values, place by place."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

MOST = 200  # differences that one answer shows

_ABSENT = object()


def differences(before: Any, after: Any) -> list[dict[str, Any]]:
    """``{"pointer", "before", "after"}`` for each value that is not the same, null where there is none; at most 200.

    Lists of objects with names are compared by name, other lists as one value.
    """
    return list(islice(_walk(before, after, "#"), MOST))


def _walk(before: Any, after: Any, path: str) -> Iterator[dict[str, Any]]:
    if before == after:
        return
    old, new = _by_name(before), _by_name(after)
    if old is None or new is None:
        yield {"pointer": path, "before": _shown(before), "after": _shown(after)}
        return
    for name in [*old, *(name for name in new if name not in old)]:
        step = str(name).replace("~", "~0").replace("/", "~1")
        yield from _walk(old.get(name, _ABSENT), new.get(name, _ABSENT), f"{path}/{step}")


def _by_name(value: Any) -> dict[str, Any] | None:
    """The members of an object, or of a list of named ones; None for anything else."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(isinstance(one, dict) and "name" in one for one in value):
        return {one["name"]: one for one in value}
    return None


def _shown(value: Any) -> Any:
    return None if value is _ABSENT else value
