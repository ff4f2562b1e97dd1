"""The version of an object that somebody still has, found again.

Theory of operation. Nothing keeps what an object looked like; the audit log keeps what each change did to it. So the
present object is taken back change by change, newest first, until its entity tag is the one that was sent. The tag is
a digest of the whole, so what has it is that version and no other; where none has it, nobody says what it was.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rest_framework.utils.encoders import JSONEncoder

from controlplane.services.audit.log import Change


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
