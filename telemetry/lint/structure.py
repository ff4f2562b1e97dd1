"""Structures of prompts as routers describe them: lengths, offsets, kinds and keyed hashes, never text.

Offsets and lengths are bytes of the canonical prompt. Of a long prompt, only the beginning and pieces of the end are
described.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    tail: tuple[Piece, ...] = ()  # pieces of the end of a prompt that is not described as a whole
    prompt_tokens: int | None = None  # of the whole prompt, as the engine counted them
    block_tokens: int | None = None  # of the engine's cache blocks

    @classmethod
    def read(
        cls, document: Any, *, prompt_tokens: int | None = None, block_tokens: int | None = None
    ) -> PromptStructure | None:
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
                tuple(Piece(int(at), int(length), hashed) for at, length, hashed in document.get("tail", ())),
                prompt_tokens,
                block_tokens,
            )  # fmt: skip
        except (AttributeError, KeyError, TypeError, ValueError):
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
    def history(self) -> tuple[Segment, ...]:
        """The messages after the system segments, without later system messages."""
        return tuple(
            segment for segment in self.segments[len(self.system_segments) :] if segment.kind not in SYSTEM_KINDS
        )

    @property
    def is_last_message_cut(self) -> bool:
        """Whether the prompt goes on after the described part."""
        return bool(self.segments) and self.segments[-1].at + self.segments[-1].length < self.length

    def segment_of(self, piece: Piece) -> Segment:
        """The segment that contains a piece."""
        return next(segment for segment in reversed(self.segments) if segment.at <= piece.at)

    @cached_property
    def piece_hashes(self) -> frozenset[str]:
        return frozenset(piece.hash for piece in self.pieces)

    def shared_bytes(self, other: PromptStructure) -> int:
        """Bytes of pieces that the other prompt also contains, at any position."""
        return sum(piece.length for piece in self.pieces if piece.hash in other.piece_hashes)
