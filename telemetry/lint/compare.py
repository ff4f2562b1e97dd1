"""Two openings -> where they begin to differ, what is there, and how much that is the same follows. Pure.

Theory of operation. Pieces stand in the order of the prompt, so the first that is not the same in both is where a cache
stops, and the bytes of later pieces that both have are what it could have gone on with. Of the tokens that often
change, the first pair in that piece that is alike in kind and not in value names the kind. Where none does, the same
letters in another order, another tool list, or a history that lost its beginning are told apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from telemetry.lint.openings import BYTES_PER_TOKEN, SYSTEM, Opening, Piece, Segment, Volatile


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
