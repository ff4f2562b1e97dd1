"""Which alerts a silence is for: labels compared with ``=``, ``!=`` and ``=~``. Pure.

An alert that lacks a label has it as an empty text. Patterns match the whole value and are RE2's, whose time is linear
in the value's length, so that no pattern of anybody's can stop an evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import re2

from controlplane.errors import Fault, InvalidError
from telemetry.alerts.labels import NAMES

OPS = ("=", "!=", "=~")
MOST, LONGEST = 10, 200  # matchers of a silence, characters of a value
_QUIET = re2.Options()
_QUIET.log_errors = False


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition."""

    label: str
    op: str
    value: str

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether labels meet it."""
        found = labels.get(self.label, "")
        if self.op == "=~":
            return compiled(self.value).fullmatch(found) is not None
        return (found == self.value) is (self.op == "=")

    def __str__(self) -> str:
        return f'{self.label}{self.op}"{self.value}"'

    def as_json(self) -> dict[str, str]:
        """What a row keeps of it."""
        return {"label": self.label, "op": self.op, "value": self.value}


@lru_cache(maxsize=256)
def compiled(pattern: str) -> Any:
    """A pattern; re2.error for what is none."""
    return re2.compile(pattern, _QUIET)


def read_matchers(given: Sequence[Mapping[str, Any]]) -> list[Matcher]:
    """Matchers out of JSON; InvalidError names everything that is wrong.

    One at least must need a label, or a silence would be of everything there is and will be.
    """
    found, faults = list[Matcher](), list[Fault]()
    if not 0 < len(given) <= MOST:
        raise InvalidError("$.matchers", f"expected 1 to {MOST} matchers")
    for place, one in enumerate(given):
        matcher = Matcher(str(one.get("label", "")), str(one.get("op", "=")), str(one.get("value", "")))
        if fault := _fault(matcher):
            faults.append(Fault(f"$.matchers[{place}].{fault[0]}", fault[1]))
        found.append(matcher)
    if faults:
        raise InvalidError.of(faults)
    if match_all(found, {}):
        raise InvalidError("$.matchers", "these match every alert; expected one that needs a label")
    return found


def _fault(matcher: Matcher) -> tuple[str, str] | None:
    if matcher.label not in NAMES:
        return "label", f"expected one of {', '.join(NAMES)}"
    if matcher.op not in OPS:
        return "op", f"expected one of {', '.join(OPS)}"
    if len(matcher.value) > LONGEST:
        return "value", f"expected at most {LONGEST} characters"
    try:
        compiled(matcher.value) if matcher.op == "=~" else None
    except re2.error:
        return "value", "this is no pattern"
    return None


def match_all(matchers: Iterable[Matcher], labels: Mapping[str, str]) -> bool:
    """Whether labels meet all of them."""
    return all(matcher.holds(labels) for matcher in matchers)
