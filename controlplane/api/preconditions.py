"""Entity tags, ``If-Match`` and ``If-None-Match``, the changes since an earlier version, and differences of JSON.

An entity tag is a digest of the representation. Where some fields are merely observed, such as the time of a rule's
last evaluation, the tag has two halves, ``"configured.observed"``: ``If-Match`` compares the first half, so that an
observation does not reject an edit, while ``If-None-Match`` compares both.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from rest_framework.request import Request
from rest_framework.utils.encoders import JSONEncoder

from controlplane.services.audit_log import Change

_TAG = re.compile(r'(W/)?("[^"]*")')
_ABSENT = object()
MAX_DIFFERENCES = 200  # in one response


def tag_of(representation: Mapping[str, Any], observed: Collection[str] = ()) -> str:
    """The strong entity tag of a representation, with quotes; its own field ``etag`` does not count."""
    excluded = {*observed, "etag"}
    configured = digest_of({name: value for name, value in representation.items() if name not in excluded})
    if not observed:
        return f'"{configured}"'
    return f'"{configured}.{digest_of({name: representation.get(name) for name in observed})}"'


def digest_of(value: object) -> str:
    """96 bits of SHA-256 over the JSON, in hex."""
    text = json.dumps(value, sort_keys=True, cls=JSONEncoder)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def has_if_match(request: Request) -> bool:
    return "If-Match" in request.headers


def if_match_holds(request: Request, tag: str) -> bool:
    """Whether ``If-Match`` names this version, or any (``*``). Weak tags never match."""
    value = request.headers.get("If-Match", "")
    if value.strip() == "*":
        return True
    return any(not weak and _configured_half(listed) == _configured_half(tag) for weak, listed in _TAG.findall(value))


def if_none_match_holds(request: Request, tag: str) -> bool:
    """Whether ``If-None-Match`` names this version, so that a 304 suffices."""
    value = request.headers.get("If-None-Match", "")
    return value.strip() == "*" or any(listed == tag for _, listed in _TAG.findall(value))


def _configured_half(tag: str) -> str:
    """The part of a tag that covers configured fields; the rest covers observed ones, which change by themselves."""
    return tag.strip('"').partition(".")[0]


def earlier_version(
    current: Mapping[str, Any], changes: Iterable[Change], is_version: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any] | None:
    """The object at the version that ``is_version`` recognizes, by undoing ``changes``, newest first; None if unknown.

    Versions are not stored; the audit log stores what each change did. The entity tag is a digest of the whole object,
    so a reconstructed state with the right tag is that version.
    """
    state: dict[str, Any] = json.loads(json.dumps(current, cls=JSONEncoder))
    for change in changes:
        if previous_values := _values_before(state, change):
            state |= previous_values
            if is_version(state):
                return state
    return None


def _values_before(state: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The fields' values before a change; {} if the change did not lead to this state: it concerns another object."""
    before, after = change
    if not isinstance(before, dict) or not isinstance(after, dict):
        return {}
    changed = [name for name in before if name in after and name in state and before[name] != after[name]]
    return {name: before[name] for name in changed} if all(state[name] == after[name] for name in changed) else {}


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
