"""An opening as routers describe it (``opening`` of a decision), read from JSON. Offsets and lengths are bytes."""

from __future__ import annotations

from dataclasses import dataclass
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
