"""One consequence of a change, and the words that consequences share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from typing import Any

import msgspec

from routing.schema import HIDDEN, SECRET_FIELDS

Path = tuple[str, ...]  # from the configuration's root; lists of named things by their names


class Impact(StrEnum):
    """What a consequence does to requests, the gravest first."""

    RESET = "reset"  # homes are found anew: expect cold caches
    MOVE = "move"  # a part of the prefixes gets another home, and is cold there at first
    REFUSE = "refuse"  # who is let in, or what is taken, changes
    STEER = "steer"  # homes stay; what happens around them changes
    QUIET = "quiet"  # no request is treated differently


GRAVITY = {impact: place for place, impact in enumerate(Impact)}


@dataclass(frozen=True, slots=True)
class Effect:
    """One consequence. ``text`` stands on its own; the other fields are for scripts."""

    kind: str  # what changed, such as "strategy", "replica_left" or "setting"
    impact: Impact
    who: tuple[str, ...]  # whose requests, such as "pool chat" or "task group chat.agents"
    text: str
    before: Any = None  # JSON, secrets hidden; None where it does not exist there
    after: Any = None
    moved_ratio: float | None = None  # the part of their prefixes or sessions that gets another home; None: not known
    paths: tuple[Path, ...] = ()  # the leaves, or whole branches, that it explains

    @property
    def resets(self) -> bool:
        """Whether affinity starts anew."""
        return self.impact is Impact.RESET


def in_order(effects: Sequence[Effect]) -> list[Effect]:
    """The gravest first, otherwise as they were found."""
    return sorted(effects, key=lambda effect: GRAVITY[effect.impact])


def part(ratio: float) -> str:
    """A part of a whole as people say it: 1/8, about 3/4, less than 1 %."""
    if ratio <= 0:
        return "none"
    if ratio >= 0.995:
        return "all"
    near = Fraction(ratio).limit_denominator(16)
    if abs(near - ratio) < 1e-6:
        return str(near)
    if near and abs(float(near) - ratio) < 0.01 * ratio and near.denominator <= 8:
        return f"about {near}"
    return f"about {ratio * 100:.0f} %" if ratio >= 0.01 else "less than 1 %"


def joined(words: Sequence[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def some(words: Sequence[str], most: int = 6) -> str:
    """The same, of many only the first ones and how many more."""
    if len(words) <= most:
        return joined(words)
    return f"{', '.join(words[: most - 1])} and {len(words) - most + 1} more"


def several(number: int, noun: str) -> str:
    """1 replica, 2 replicas."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shown(value: Any, field: str = "") -> str:
    """A value as an operator writes it; never a secret's."""
    if field in SECRET_FIELDS and value:
        return HIDDEN
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, str):
        return value or "nothing"
    if isinstance(value, list | tuple):
        return some([shown(one) for one in value]) or "none"
    return msgspec.json.encode(value).decode()
