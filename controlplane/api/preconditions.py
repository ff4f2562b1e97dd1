"""Entity tags: which version of an object somebody looked at, and whether it is still the present one.

A tag is a digest of what is shown. Where some of that is merely observed, such as when a rule was last evaluated, it
has two halves, ``"wanted.observed"``: a change is refused only if what people decide has moved on, while
``If-None-Match`` compares the whole.

The version of an object that somebody still has, found again.

Theory of operation. Nothing keeps what an object looked like; the audit log keeps what each change did to it. So the
present object is taken back change by change, newest first, until its entity tag is the one that was sent. The tag is
a digest of the whole, so what has it is that version and no other; where none has it, nobody says what it was.

What differs between two JSON values, place by place.
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

_written = re.compile(r'(W/)?("[^"]*")')
ANY = "*"


def tag_of(shown: Mapping[str, Any], observed: Collection[str] = ()) -> str:
    """The strong entity tag of a representation, quotes included; its own field ``etag`` does not count."""
    wanted = digest_of({name: value for name, value in shown.items() if name not in {*observed, "etag"}})
    if not observed:
        return f'"{wanted}"'
    return f'"{wanted}.{digest_of({name: shown.get(name) for name in observed})}"'


def digest_of(shown: object) -> str:
    """96 bits of SHA-256 over the JSON, in hex."""
    text = json.dumps(shown, sort_keys=True, cls=JSONEncoder)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def is_asked_for(request: Request) -> bool:
    """Whether the client said which version it looked at."""
    return "If-Match" in request.headers


def still_matches(request: Request, tag: str) -> bool:
    """Whether ``If-Match`` names the present version, or any (``*``). Weak tags never match."""
    given = request.headers.get("If-Match", "")
    if given.strip() == ANY:
        return True
    return any(not weak and _wanted(one) == _wanted(tag) for weak, one in _written.findall(given))


def is_known(request: Request, tag: str) -> bool:
    """Whether ``If-None-Match`` names the present version: a 304 says all there is to say."""
    given = request.headers.get("If-None-Match", "")
    return given.strip() == ANY or any(one == tag for _, one in _written.findall(given))


def _wanted(tag: str) -> str:
    return tag.strip('"').partition(".")[0]


def earlier_version(
    now: Mapping[str, Any], changes: Iterable[Change], is_it: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any] | None:
    """The object as it was when ``is_it``; None if these changes, newest first, do not lead there."""
    state: dict[str, Any] = json.loads(json.dumps(now, cls=JSONEncoder))
    for change in changes:
        if undone := _undone(state, change):
            state |= undone
            if is_it(state):
                return state
    return None


def _undone(state: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """What was otherwise before a change; nothing if the change did not lead to this state, and so is of another."""
    before, after = change
    if not isinstance(before, dict) or not isinstance(after, dict):
        return {}
    named = [name for name in before if name in after and name in state and before[name] != after[name]]
    return {name: before[name] for name in named} if all(state[name] == after[name] for name in named) else {}


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
