"""The first difference between two prompts: where it is, of what kind, and how much identical text follows.

Theory of operation. Pieces are in prompt order, so the first piece that differs is where a prefix cache stops, and
later pieces that both prompts contain are what it could have shared. The first volatile token (date, id, number ...) of
that piece that has the same kind in both prompts but another value names the cause. Otherwise the cause is reordered
text, another tool list, or a truncated history.

Each prompt is compared with the most similar of some earlier ones. These are the ``MAX_COMPARED`` before it, because
neighbours in time may belong to different prompts of the same task group. The latest one before these that shares a
long message with it is compared too, because consecutive turns of a conversation may be far apart.

Truncated histories. Clients that keep a conversation within a limit drop its oldest messages, often behind a system
prompt or a first message that they keep. The messages that both prompts contain then are at other positions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from telemetry.lint.structure import BYTES_PER_TOKEN, Piece, PromptStructure, Segment, Volatile

MAX_COMPARED = 8  # earlier prompts that a prompt is compared with
LONG_MESSAGE_BYTES = 64  # a message that identifies a conversation


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
    TRUNCATED = "truncated"  # the history lost its oldest messages
    ORDER = "order"  # changing text before constant text
    ALIGNMENT = "alignment"  # the shared beginning ends inside a cache block
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
    dropped_bytes: int = 0  # of a truncated history: the messages that only one prompt has
    dropped_messages: int = 0

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
    index = first_difference(prompt.pieces, other.pieces)
    if index is None:
        return None
    piece, other_piece = prompt.pieces[index], other.pieces[index]
    segment = prompt.segment_of(piece)
    if cut := _truncation(prompt, other):
        return Difference(Kind.TRUNCATED, "history", 0, *cut)
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


def first_difference(pieces: Sequence[Piece], other: Sequence[Piece]) -> int | None:
    """Index of the first piece that differs; None if one list begins with the other."""
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


class Truncation(NamedTuple):
    """What two prompts of one conversation share although one of them lacks old messages."""

    shared_bytes: int
    dropped_bytes: int
    dropped_messages: int


def _truncation(prompt: PromptStructure, other: PromptStructure) -> Truncation | None:
    """None unless one prompt has the other's history without some of its oldest messages."""
    for longer, shorter in ((other, prompt), (prompt, other)):
        kept = _equal_messages(longer.history, shorter.history)
        rest = shorter.history[kept:]
        if not rest:
            continue
        for start in range(kept + 1, len(longer.history)):
            if _is_same_message(longer.history[start], rest[0]) and (
                shared_bytes := _overlap_bytes(longer, longer.history[start:], shorter, rest)
            ):
                dropped = longer.history[kept:start]
                return Truncation(shared_bytes, sum(message.length for message in dropped), len(dropped))
    return None


def _is_same_message(message: Segment, other: Segment) -> bool:
    return (message.hash, message.kind) == (other.hash, other.kind)


def _equal_messages(messages: Sequence[Segment], others: Sequence[Segment]) -> int:
    """Number of equal messages at the beginning of both."""
    pairs = enumerate(zip(messages, others, strict=False))
    return next((n for n, pair in pairs if not _is_same_message(*pair)), min(len(messages), len(others)))


def _overlap_bytes(
    longer: PromptStructure, messages: Sequence[Segment], shorter: PromptStructure, others: Sequence[Segment]
) -> int:
    """Bytes that two histories share from their first messages on; 0 unless one of them is a prefix of the other.

    Only the beginning of a prompt is described. If that is equal, the rest is assumed to be equal too.
    """
    # Two equal messages are needed, if there are two, because one may be equal by chance. The last message of a
    # description that is cut cannot be compared.
    same = _equal_messages(messages, others)
    is_cut = longer.is_last_message_cut or shorter.is_last_message_cut
    needed = 2 if is_cut else min(2, len(messages))
    if same < max(needed, min(len(messages), len(others)) - is_cut):
        return 0
    if is_cut:
        return min(longer.length - messages[0].at, shorter.length - others[0].at)
    return sum(message.length for message in messages[:same])


def most_similar(prompts: Sequence[PromptStructure]) -> Iterator[tuple[int, int]]:
    """(index of each prompt, index of the most similar earlier one); ``prompts`` in order of time."""
    newest_with: dict[str, int] = {}  # index by hash of a long message
    for index, prompt in enumerate(prompts):
        long_messages = [message.hash for message in prompt.history if message.length >= LONG_MESSAGE_BYTES]
        earlier = set(range(max(index - MAX_COMPARED, 0), index))
        if known := [newest_with[name] for name in long_messages if name in newest_with]:
            earlier.add(max(known))
        if earlier:
            yield index, max((prompt.shared_bytes(prompts[other]), other) for other in earlier)[1]
        newest_with.update(dict.fromkeys(long_messages, index))
