"""The openings of a task group -> what keeps its prompts from sharing more, worst first. Pure.

Each opening is compared with the one, of the few before it, that it has most in common with: where several prompts
share a task group, neighbours in time may have nothing in common.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from telemetry.lint.compare import Difference, Kind, compare
from telemetry.lint.openings import Opening

LOOK_BACK = 8  # openings that one is compared with
MIN_STABLE = 512  # bytes behind a difference that are worth a word, about 128 tokens
MIN_PAIRS = 3  # that show the same, before it is told
MIN_SHARE = 0.05  # of all pairs
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that makes prompts differ before much that is the same."""

    kind: Kind
    segment: str
    at_tokens: int  # estimated tokens into the segment; the least of all pairs
    stable_tokens: int  # that follow, at the median
    share: float  # of the pairs that were compared
    pairs: int  # that were compared
    tokens_per_day: float | None  # computed anew for it; None where the rate of requests is unknown

    @property
    def where(self) -> str:
        """Its place, in words."""
        return place(self.kind, self.segment, self.at_tokens)

    @property
    def what(self) -> str:
        """What is there, in words."""
        return WHAT[self.kind]

    @property
    def advice(self) -> str:
        """What to do about it."""
        return ADVICE[self.kind]


WHAT = {
    Kind.DATE: "a date or time",
    Kind.EPOCH: "a time in seconds",
    Kind.UUID: "a UUID",
    Kind.HEX: "a hexadecimal id",
    Kind.ID: "an id",
    Kind.COUNTER: "a number that changes",
    Kind.REORDERED: "the same things in another order",
    Kind.TOOLS: "another tool list",
    Kind.TRUNCATED: "a history that lost its beginning",
    Kind.OTHER: "text that changes",
}
_TO_THE_END = "Move it behind everything that stays the same, for example into the last message"
ADVICE = {
    Kind.DATE: f"{_TO_THE_END}, or write the day without the time.",
    Kind.EPOCH: f"{_TO_THE_END}, or leave it out.",
    Kind.UUID: f"{_TO_THE_END}, or send it as a header: the model seldom needs it.",
    Kind.HEX: f"{_TO_THE_END}, or send it as a header: the model seldom needs it.",
    Kind.ID: f"{_TO_THE_END}, or send it as a header: the model seldom needs it.",
    Kind.COUNTER: f"{_TO_THE_END}, or leave it out.",
    Kind.REORDERED: "Write it in a fixed order: sort keys and tools before they are sent.",
    Kind.TOOLS: "Send the same tools with every request of this purpose, and say in tool_choice which may be used.",
    Kind.TRUNCATED: "Drop old messages in large steps and seldom, not one with each request, so that the rest stays.",
    Kind.OTHER: f"{_TO_THE_END}.",
}


NAMES = {"system": "system prompt", "developer": "developer message", "prompt": "prompt", "other": "message"}


def place(kind: Kind, segment: str, at_tokens: int) -> str:
    """Where something is, in words."""
    if kind is Kind.TRUNCATED:
        return "at the beginning of the history"
    if segment == "tools":
        return "in the tool list"
    name = NAMES.get(segment, f"{segment} message")
    return f"at the beginning of the {name}" if at_tokens < 2 else f"in the {name}, about {at_tokens} tokens in"


def describe(difference: Difference) -> str:
    """A difference as the end of a sentence about prompts."""
    where = place(difference.kind, difference.segment, difference.at_tokens)
    return f"have {WHAT[difference.kind]} {where}"


def pairs_of(openings: Sequence[Opening]) -> list[Difference | None]:
    """Each opening beside the one before it that it shares most with; ``openings`` in order of time."""
    found: list[Difference | None] = []
    for place, opening in enumerate(openings[1:], 1):
        earlier = openings[max(place - LOOK_BACK, 0) : place]
        found.append(compare(opening, max(reversed(earlier), key=opening.shared)))
    return found


def lint(openings: Sequence[Opening], requests_per_s: float | None) -> list[Finding]:
    """What differs before a large stable part; ``openings`` in order of time."""
    pairs = pairs_of(openings)
    alike: dict[tuple[Kind, str], list[Difference]] = defaultdict(list)
    for difference in pairs:
        if difference is not None and difference.stable >= MIN_STABLE:
            alike[difference.kind, difference.segment].append(difference)
    findings = [_finding(differences, len(pairs), requests_per_s) for differences in alike.values()]
    told = [it for it in findings if it.share * it.pairs >= MIN_PAIRS and it.share >= MIN_SHARE]
    return sorted(told, key=lambda it: it.share * it.stable_tokens, reverse=True)


def _finding(differences: Sequence[Difference], pairs: int, requests_per_s: float | None) -> Finding:
    stable = sorted(it.stable_tokens for it in differences)[len(differences) // 2]
    share = len(differences) / pairs
    lost = None if requests_per_s is None else stable * share * requests_per_s * DAY_S
    first = differences[0]
    at = min(it.at_tokens for it in differences)
    return Finding(first.kind, first.segment, at, stable, share, pairs, lost)
