"""An opening as routers describe it (``opening`` of a decision), read from JSON. Offsets and lengths are bytes.

Two openings -> where they begin to differ, what is there, and how much that is the same follows. Pure.

Theory of operation. Pieces stand in the order of the prompt, so the first that is not the same in both is where a cache
stops, and the bytes of later pieces that both have are what it could have gone on with. Of the tokens that often
change, the first pair in that piece that is alike in kind and not in value names the kind. Where none does, the same
letters in another order, another tool list, or a history that lost its beginning are told apart.

The openings of a task group -> what keeps its prompts from sharing more, worst first. Pure.

Each opening is compared with the one, of the few before it, that it has most in common with: where several prompts
share a task group, neighbours in time may have nothing in common.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

BYTES_PER_TOKEN = 4  # of English text, roughly
SYSTEM = frozenset({"tools", "system", "developer"})


@dataclass(frozen=True, slots=True)
class Segment:
    """The tools, or one message."""

    kind: str
    at: int
    length: int
    hash: str
    letters: str  # the same for the same things in another order


@dataclass(frozen=True, slots=True)
class Piece:
    """Some lines or sentences of a segment."""

    at: int
    length: int
    hash: str


@dataclass(frozen=True, slots=True)
class Volatile:
    """Something that is seldom the same twice."""

    kind: str
    at: int
    length: int
    hash: str


@dataclass(frozen=True, slots=True)
class Tools:
    """Hashes of the tool list: sorted names, definitions in any order, and as it was sent."""

    names: str
    definitions: str
    sent: str


@dataclass(frozen=True)
class Opening:
    """What is known of one prompt's opening."""

    length: int  # of the whole prompt
    messages: int
    session: str | None
    tools: Tools | None
    segments: tuple[Segment, ...]
    pieces: tuple[Piece, ...]
    volatile: tuple[Volatile, ...]

    @classmethod
    def read(cls, document: Any) -> Opening | None:
        """Read a router's JSON; None for what is none, for routers may be newer than this."""
        try:
            tools = document["tools"]
            opening = cls(
                int(document["bytes"]),
                int(document["messages"]),
                document["session"],
                None if tools is None else Tools(tools["names"], tools["definitions"], tools["sent"]),
                tuple(Segment(it["kind"], int(it["at"]), int(it["bytes"]), it["hash"], it["letters"])
                      for it in document["segments"]),
                tuple(Piece(int(at), int(length), hashed) for at, length, hashed in document["pieces"]),
                tuple(Volatile(it["kind"], int(it["at"]), int(it["bytes"]), it["hash"])
                      for it in document["volatile"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            return None
        first = min((segment.at for segment in opening.segments), default=None)
        is_covered = all(first is not None and first <= piece.at for piece in opening.pieces)
        return opening if is_covered else None

    @cached_property
    def head(self) -> tuple[Segment, ...]:
        """The tools and the system messages that begin it."""
        count = 0
        while count < len(self.segments) and self.segments[count].kind in SYSTEM:
            count += 1
        return self.segments[:count]

    @cached_property
    def signature(self) -> tuple[str, ...]:
        """What tells one head from another; that of the tools as an engine renders them."""
        sent = () if self.tools is None else (self.tools.sent,)
        return (*sent, *(segment.hash for segment in self.head))

    @cached_property
    def piece_hashes(self) -> frozenset[str]:
        """Of all pieces."""
        return frozenset(piece.hash for piece in self.pieces)

    def shared(self, other: Opening) -> int:
        """Bytes of pieces that the other has too, anywhere."""
        known = other.piece_hashes
        return sum(piece.length for piece in self.pieces if piece.hash in known)


class Kind(StrEnum):
    """What stands where two prompts begin to differ."""

    DATE = "date"
    EPOCH = "epoch"
    UUID = "uuid"
    HEX = "hex"
    ID = "id"
    COUNTER = "counter"
    REORDERED = "reordered"  # the same things in another order
    TOOLS = "tools"  # another tool list
    TRUNCATED = "truncated"  # the beginning of the history is gone
    OTHER = "other"


_KINDS = {
    "date": Kind.DATE,
    "epoch": Kind.EPOCH,
    "uuid": Kind.UUID,
    "hex": Kind.HEX,
    "id": Kind.ID,
    "number": Kind.COUNTER,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """Where and how one opening leaves the other."""

    kind: Kind
    segment: str  # the kind of the segment
    at: int  # bytes into that segment
    stable: int  # bytes behind it that both have

    @property
    def at_tokens(self) -> int:
        """Estimated tokens into the segment."""
        return self.at // BYTES_PER_TOKEN

    @property
    def stable_tokens(self) -> int:
        """Estimated tokens that are computed anew for nothing."""
        return self.stable // BYTES_PER_TOKEN


def compare(one: Opening, other: Opening) -> Difference | None:
    """The first difference; None where one of them is a beginning of the other."""
    if one.tools and other.tools and one.tools.definitions == other.tools.definitions:
        if one.tools.sent != other.tools.sent:  # keys are sorted in all that follows; engines do not sort them
            return Difference(Kind.REORDERED, "tools", 0, one.shared(other))
    elif one.tools != other.tools:
        return Difference(Kind.TOOLS, "tools", 0, _behind(one, 0, other, 0))
    place = _first_difference(one.pieces, other.pieces)
    if place is None:
        return None
    mine, theirs = one.pieces[place], other.pieces[place]
    segment = _segment_of(one, mine.at)
    if truncated := _truncated(one, other):
        return Difference(Kind.TRUNCATED, "history", 0, truncated)
    stable = _behind(one, place + 1, other, place + 1)
    if pair := _changed(one.volatile, mine, other.volatile, theirs):
        return Difference(_KINDS.get(pair.kind, Kind.OTHER), segment.kind, pair.at - segment.at, stable)
    twin = next((it for it in other.segments if it.kind == segment.kind and it.at == segment.at), None)
    is_reordered = twin is not None and twin.letters == segment.letters and twin.hash != segment.hash
    return Difference(Kind.REORDERED if is_reordered else Kind.OTHER, segment.kind, mine.at - segment.at, stable)


def _first_difference(one: Sequence[Piece], other: Sequence[Piece]) -> int | None:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a.hash != b.hash), None)


def _segment_of(opening: Opening, at: int) -> Segment:
    return next(it for it in reversed(opening.segments) if it.at <= at)


def _behind(one: Opening, start: int, other: Opening, other_start: int) -> int:
    """Bytes of later pieces that both have, each as often as the one that has it less often."""
    known = Counter(piece.hash for piece in other.pieces[other_start:])
    found = 0
    for piece in one.pieces[start:]:
        if known[piece.hash] > 0:
            known[piece.hash] -= 1
            found += piece.length
    return found


def _changed(one: Sequence[Volatile], mine: Piece, other: Sequence[Volatile], theirs: Piece) -> Volatile | None:
    """The first token of a piece whose twin in the other's piece is of its kind and not the same."""
    ours = [it for it in one if mine.at <= it.at < mine.at + mine.length]
    twins = [it for it in other if theirs.at <= it.at < theirs.at + theirs.length]
    for token, twin in zip(ours, twins, strict=False):
        if token.hash != twin.hash:
            return token if token.kind == twin.kind or "number" in {token.kind, twin.kind} else None
    return None


def _truncated(one: Opening, other: Opening) -> int:
    """Bytes of the messages that a later prompt of a conversation shares with it, the first ones being gone; else 0."""
    for longer, shorter in ((_talk(one), _talk(other)), (_talk(other), _talk(one))):
        if not shorter:
            continue
        places = [n for n, it in enumerate(longer) if n and it.hash == shorter[0].hash and it.kind == shorter[0].kind]
        for place in places:
            run = longer[place:]
            same = [a for a, b in zip(run, shorter, strict=False) if a.hash == b.hash]
            if len(same) >= min(2, len(run)) and len(same) == min(len(run), len(shorter)):
                return sum(it.length for it in same)
    return 0


def _talk(opening: Opening) -> Sequence[Segment]:
    """The messages behind the head."""
    return [it for it in opening.segments[len(opening.head) :] if it.kind not in SYSTEM]


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
