"""Which alerts go where: conditions on labels, written as people read them. Pure.

``severity=critical,warning`` holds where the label is one of these, ``pool!=lab-*`` where it is none; ``*`` at the end
stands for any ending. An alert without the label has "" there. All conditions must hold; without any, everything does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MOST = 20  # conditions, and values of one
LONGEST = 200
SYNTAX = re.compile(r"\s*([a-z_][a-z0-9_]{0,62})\s*(!?=)(?!~)\s*(.*\S)\s*\Z")


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition."""

    label: str
    values: tuple[str, ...]
    negated: bool = False

    @classmethod
    def parse(cls, written: str) -> Matcher:
        """What is written; ValueError with what was expected."""
        found = SYNTAX.match(written) if len(written) <= LONGEST else None
        values = tuple(value for part in found[3].split(",") if (value := part.strip())) if found else ()
        if found is None or not 1 <= len(values) <= MOST:
            raise ValueError("expected label=value, label=value,value or label!=value")
        return cls(found[1], values, found[2] == "!=")

    def holds(self, labels: Mapping[str, str]) -> bool:
        """Whether labels meet it."""
        value = str(labels.get(self.label) or "")
        return self.negated != any(_is(value, wanted) for wanted in self.values)

    def __str__(self) -> str:
        return f"{self.label}{'!=' if self.negated else '='}{','.join(self.values)}"


def _is(value: str, wanted: str) -> bool:
    return value.startswith(wanted[:-1]) if wanted.endswith("*") else value == wanted


def all_hold(written: Iterable[str], labels: Mapping[str, str]) -> bool:
    """Whether labels meet every one of the stored conditions."""
    return all(Matcher.parse(one).holds(labels) for one in written)


def checked(given: Iterable[str]) -> list[str]:
    """Conditions in their usual form; ValueError."""
    found = [str(Matcher.parse(one)) for one in given if one.strip()]
    if len(found) > MOST:
        raise ValueError(f"expected up to {MOST} conditions")
    return list(dict.fromkeys(found))


def labels_of(data: Mapping[str, object]) -> dict[str, str]:
    """The labels of an alert's payload; those that it always has from its own fields."""
    given = data.get("labels")
    own = {name: str(data[name]) for name in ("pool", "rule", "kind") if data.get(name)}
    return {**own, **({str(name): str(value) for name, value in given.items()} if isinstance(given, Mapping) else {})}
