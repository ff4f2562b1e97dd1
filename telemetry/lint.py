"""Prompt lint: finds differences between prompts of a task group that come before text they share. Pure.

Theory of operation. A router describes the structure of some prompts (``opening`` of a decision) by hashes; offsets and
lengths are bytes. Pieces are in prompt order, so the first piece that differs is where a prefix cache stops, and later
pieces that both prompts contain are what it could have shared. The first volatile token (date, id, number ...) of that
piece that has the same kind in both prompts but another value names the cause. Otherwise the cause is reordered text,
another tool list, or a truncated history.

Each prompt is compared with the most similar of the ``MAX_COMPARED`` before it, because neighbours in time may belong
to different prompts of the same task group.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any

BYTES_PER_TOKEN = 4  # of English text, roughly
SYSTEM_KINDS = frozenset({"tools", "system", "developer"})


@dataclass(frozen=True, slots=True)
class Segment:
    """The tool list, or one message."""

    kind: str
    at: int
    length: int
    hash: str
    unordered_hash: str  # does not depend on the order of characters


@dataclass(frozen=True, slots=True)
class Piece:
    """Some lines or sentences of a segment."""

    at: int
    length: int
    hash: str


@dataclass(frozen=True, slots=True)
class Volatile:
    """A token that often changes between requests."""

    kind: str
    at: int
    length: int
    hash: str


@dataclass(frozen=True, slots=True)
class Tools:
    """Hashes of the tool list: of sorted names, of sorted definitions, and as sent."""

    names: str
    definitions: str
    sent: str


@dataclass(frozen=True)
class PromptStructure:
    """Structure of the beginning of one prompt."""

    length: int  # of the whole prompt
    messages: int
    session: str | None
    tools: Tools | None
    segments: tuple[Segment, ...]
    pieces: tuple[Piece, ...]
    volatile: tuple[Volatile, ...]

    @classmethod
    def read(cls, document: Any) -> PromptStructure | None:
        """Read a router's JSON; None if it has another format, because routers may be newer."""
        try:
            tools = document["tools"]
            structure = cls(
                int(document["bytes"]),
                int(document["messages"]),
                document["session"],
                None if tools is None else Tools(tools["names"], tools["definitions"], tools["sent"]),
                tuple(Segment(row["kind"], int(row["at"]), int(row["bytes"]), row["hash"], row["letters"])
                      for row in document["segments"]),
                tuple(Piece(int(at), int(length), hashed) for at, length, hashed in document["pieces"]),
                tuple(Volatile(row["kind"], int(row["at"]), int(row["bytes"]), row["hash"])
                      for row in document["volatile"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError):
            return None
        first_at = min((segment.at for segment in structure.segments), default=None)
        is_covered = all(first_at is not None and first_at <= piece.at for piece in structure.pieces)
        return structure if is_covered else None

    @cached_property
    def system_segments(self) -> tuple[Segment, ...]:
        """The tools and the leading system messages."""
        count = 0
        while count < len(self.segments) and self.segments[count].kind in SYSTEM_KINDS:
            count += 1
        return self.segments[:count]

    @cached_property
    def signature(self) -> tuple[str, ...]:
        """Identifies the system segments, with the tools as engines render them."""
        sent = () if self.tools is None else (self.tools.sent,)
        return (*sent, *(segment.hash for segment in self.system_segments))

    @cached_property
    def piece_hashes(self) -> frozenset[str]:
        return frozenset(piece.hash for piece in self.pieces)

    def shared_bytes(self, other: PromptStructure) -> int:
        """Bytes of pieces that the other prompt also contains, at any position."""
        return sum(piece.length for piece in self.pieces if piece.hash in other.piece_hashes)


class Kind(StrEnum):
    """Kind of the first difference between two prompts."""

    DATE = "date"
    EPOCH = "epoch"
    UUID = "uuid"
    HEX = "hex"
    ID = "id"
    COUNTER = "counter"
    REORDERED = "reordered"  # the same text in another order
    TOOLS = "tools"  # another tool list
    TRUNCATED = "truncated"  # the history lost its beginning
    OTHER = "other"


_KIND_OF_TOKEN = {
    "date": Kind.DATE,
    "epoch": Kind.EPOCH,
    "uuid": Kind.UUID,
    "hex": Kind.HEX,
    "id": Kind.ID,
    "number": Kind.COUNTER,
}


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two prompts."""

    kind: Kind
    segment: str  # the kind of the segment
    at: int  # bytes into that segment
    stable_bytes: int  # after it, in both prompts

    @property
    def at_tokens(self) -> int:
        """Estimated tokens into the segment."""
        return self.at // BYTES_PER_TOKEN

    @property
    def stable_tokens(self) -> int:
        """Estimated tokens that could have been shared."""
        return self.stable_bytes // BYTES_PER_TOKEN


def compare(prompt: PromptStructure, other: PromptStructure) -> Difference | None:
    """The first difference; None if one is a prefix of the other."""
    if prompt.tools and other.tools and prompt.tools.definitions == other.tools.definitions:
        if prompt.tools.sent != other.tools.sent:  # engines do not sort tools, so the order matters
            return Difference(Kind.REORDERED, "tools", 0, prompt.shared_bytes(other))
    elif prompt.tools != other.tools:
        return Difference(Kind.TOOLS, "tools", 0, _shared_after(prompt, 0, other, 0))
    index = _first_difference(prompt.pieces, other.pieces)
    if index is None:
        return None
    piece, other_piece = prompt.pieces[index], other.pieces[index]
    segment = next(segment for segment in reversed(prompt.segments) if segment.at <= piece.at)
    if history_bytes := _shared_history_bytes(prompt, other):
        return Difference(Kind.TRUNCATED, "history", 0, history_bytes)
    stable_bytes = _shared_after(prompt, index + 1, other, index + 1)
    if token := _changed_token(prompt.volatile, piece, other.volatile, other_piece):
        return Difference(_KIND_OF_TOKEN.get(token.kind, Kind.OTHER), segment.kind, token.at - segment.at, stable_bytes)
    key = (segment.kind, segment.at)
    counterpart = next((candidate for candidate in other.segments if (candidate.kind, candidate.at) == key), None)
    is_reordered = (
        counterpart is not None
        and counterpart.unordered_hash == segment.unordered_hash
        and counterpart.hash != segment.hash
    )
    return Difference(Kind.REORDERED if is_reordered else Kind.OTHER, segment.kind, piece.at - segment.at, stable_bytes)


def _first_difference(pieces: Sequence[Piece], other: Sequence[Piece]) -> int | None:
    return next((n for n, (a, b) in enumerate(zip(pieces, other, strict=False)) if a.hash != b.hash), None)


def _shared_after(prompt: PromptStructure, start: int, other: PromptStructure, other_start: int) -> int:
    """Bytes of later pieces in both prompts; a repeated piece counts as often as it is in both."""
    available = Counter(piece.hash for piece in other.pieces[other_start:])
    shared = 0
    for piece in prompt.pieces[start:]:
        if available[piece.hash] > 0:
            available[piece.hash] -= 1
            shared += piece.length
    return shared


def _changed_token(
    volatile: Sequence[Volatile], piece: Piece, other: Sequence[Volatile], other_piece: Piece
) -> Volatile | None:
    """The first volatile token of a piece that differs from its counterpart, if both have the same kind."""
    tokens = [token for token in volatile if piece.at <= token.at < piece.at + piece.length]
    counterparts = [token for token in other if other_piece.at <= token.at < other_piece.at + other_piece.length]
    for token, counterpart in zip(tokens, counterparts, strict=False):
        if token.hash != counterpart.hash:
            return token if token.kind == counterpart.kind or "number" in {token.kind, counterpart.kind} else None
    return None


def _shared_history_bytes(prompt: PromptStructure, other: PromptStructure) -> int:
    """Bytes of the history that two prompts share if one of them lacks its first messages; else 0."""
    histories = (_history(prompt), _history(other))
    for longer, shorter in (histories, histories[::-1]):
        if not shorter:
            continue
        first = (shorter[0].hash, shorter[0].kind)
        starts = [n for n, message in enumerate(longer) if n and (message.hash, message.kind) == first]
        for start in starts:
            rest = longer[start:]
            same = [a for a, b in zip(rest, shorter, strict=False) if a.hash == b.hash]
            if len(same) >= min(2, len(rest)) and len(same) == min(len(rest), len(shorter)):
                return sum(message.length for message in same)
    return 0


def _history(prompt: PromptStructure) -> Sequence[Segment]:
    return [segment for segment in prompt.segments[len(prompt.system_segments) :] if segment.kind not in SYSTEM_KINDS]


MAX_COMPARED = 8  # earlier prompts that a prompt is compared with
MIN_STABLE_BYTES = 512  # bytes of shared text after a difference for a finding, about 128 tokens
MIN_PAIRS = 3  # pairs with the same difference for a finding
MIN_SHARE = 0.05  # of all pairs, for a finding
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of differences before shared text."""

    kind: Kind
    segment: str
    at_tokens: int  # estimated tokens into the segment, minimum of all pairs
    stable_tokens: int  # shared tokens that follow, median
    share: float  # of the compared pairs
    pairs: int  # compared pairs
    tokens_per_day: float | None  # recomputed because of it; None: request rate unknown

    @property
    def where(self) -> str:
        return place(self.kind, self.segment, self.at_tokens)

    @property
    def what(self) -> str:
        return KIND_TEXTS[self.kind]

    @property
    def advice(self) -> str:
        return ADVICE[self.kind]


KIND_TEXTS = {
    Kind.DATE: "a date or time",
    Kind.EPOCH: "a time in seconds",
    Kind.UUID: "a UUID",
    Kind.HEX: "a hexadecimal id",
    Kind.ID: "an id",
    Kind.COUNTER: "a changing number",
    Kind.REORDERED: "the same text in another order",
    Kind.TOOLS: "a different tool list",
    Kind.TRUNCATED: "a history without its first messages",
    Kind.OTHER: "changing text",
}
_MOVE_LATER = "Move it after all constant text, for example into the last message"
ADVICE = {
    Kind.DATE: f"{_MOVE_LATER}, or write the day without the time.",
    Kind.EPOCH: f"{_MOVE_LATER}, or leave it out.",
    Kind.UUID: f"{_MOVE_LATER}, or send it as a header: models rarely need it.",
    Kind.HEX: f"{_MOVE_LATER}, or send it as a header: models rarely need it.",
    Kind.ID: f"{_MOVE_LATER}, or send it as a header: models rarely need it.",
    Kind.COUNTER: f"{_MOVE_LATER}, or leave it out.",
    Kind.REORDERED: "Use a fixed order: sort keys and tools before sending.",
    Kind.TOOLS: "Send the same tools with every request of the task, and restrict their use by tool_choice.",
    Kind.TRUNCATED: "Drop old messages rarely and many at once, instead of one with each request.",
    Kind.OTHER: f"{_MOVE_LATER}.",
}


SEGMENT_NAMES = {"system": "system prompt", "developer": "developer message", "prompt": "prompt", "other": "message"}


def place(kind: Kind, segment: str, at_tokens: int) -> str:
    """The position of a difference, as text."""
    if kind is Kind.TRUNCATED:
        return "at the beginning of the history"
    if segment == "tools":
        return "in the tool list"
    name = SEGMENT_NAMES.get(segment, f"{segment} message")
    return f"at the beginning of the {name}" if at_tokens < 2 else f"in the {name}, about {at_tokens} tokens in"


def describe(difference: Difference) -> str:
    """A difference as the predicate of a sentence about prompts."""
    where = place(difference.kind, difference.segment, difference.at_tokens)
    return f"have {KIND_TEXTS[difference.kind]} {where}"


def differences(prompts: Sequence[PromptStructure]) -> list[Difference | None]:
    """The difference of each prompt from the most similar earlier one; ``prompts`` in order of time."""
    result: list[Difference | None] = []
    for index, prompt in enumerate(prompts[1:], 1):
        earlier = prompts[max(index - MAX_COMPARED, 0) : index]
        result.append(compare(prompt, max(reversed(earlier), key=prompt.shared_bytes)))
    return result


def lint(prompts: Sequence[PromptStructure], requests_per_s: float | None) -> list[Finding]:
    """Findings, worst first; ``prompts`` in order of time."""
    pairs = differences(prompts)
    by_cause: dict[tuple[Kind, str], list[Difference]] = defaultdict(list)
    for difference in pairs:
        if difference is not None and difference.stable_bytes >= MIN_STABLE_BYTES:
            by_cause[difference.kind, difference.segment].append(difference)
    findings = [_finding(same_cause, len(pairs), requests_per_s) for same_cause in by_cause.values()]
    relevant = [item for item in findings if item.share * item.pairs >= MIN_PAIRS and item.share >= MIN_SHARE]
    return sorted(relevant, key=lambda item: item.share * item.stable_tokens, reverse=True)


def _finding(same_cause: Sequence[Difference], pairs: int, requests_per_s: float | None) -> Finding:
    stable_tokens = sorted(difference.stable_tokens for difference in same_cause)[len(same_cause) // 2]
    share = len(same_cause) / pairs
    tokens_per_day = None if requests_per_s is None else stable_tokens * share * requests_per_s * DAY_S
    first = same_cause[0]
    at_tokens = min(difference.at_tokens for difference in same_cause)
    return Finding(first.kind, first.segment, at_tokens, stable_tokens, share, pairs, tokens_per_day)
