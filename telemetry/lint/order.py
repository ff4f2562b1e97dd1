"""Constant text after changing text: instructions, examples or reminders that come too late in a prompt to be shared.

Theory of operation. Prompts that share text form a cluster, because a task group may have several prompts. A piece is
constant if most prompts of its cluster, and most of its conversations, contain it. Constant pieces after the first
changing text of a prompt could be cached if they were moved before it. Changing text is a run of pieces that are not
constant: of a system prompt it must be long, because a date or an id there is a finding of its own, which is better
moved than all that follows it. Text that only turns of one conversation share is its history and not constant.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from telemetry.lint.differences import LONG_MESSAGE_BYTES, Difference, Kind, first_difference
from telemetry.lint.structure import SYSTEM_KINDS, Piece, PromptStructure

MIN_STABLE_BYTES = 512  # bytes of shared text after a difference for a finding, about 128 tokens
MIN_PROMPTS = 6  # of a cluster
MIN_CONVERSATIONS = 4
CONSTANT_SHARE = 0.8  # of a cluster's prompts, and of its conversations, that contain a constant piece
MIN_CHANGING_BYTES, MIN_CHANGING_PIECES = 2048, 3  # of changing text; less may be the piece of a date or an id
_MOVABLE = frozenset({Kind.OTHER, Kind.COUNTER, Kind.ID, Kind.DATE, Kind.EPOCH, Kind.UUID, Kind.HEX})


def with_late_constants(
    prompts: Sequence[PromptStructure], pairs: Sequence[tuple[int, int]], found: Mapping[int, Difference | None]
) -> Iterator[Difference]:
    """Differences of ``found``, by index of the prompt, and those of the kind ``ORDER``, which may replace them.

    Left out are differences between conversations whose later text is neither constant nor the same history, such as
    documents that both happened to retrieve: no change of the prompts would share it.
    """
    earlier = dict(pairs)
    for cluster in _clusters(prompts, pairs):
        constant = _constant_hashes([prompts[index] for index in cluster])
        for index in sorted(set(cluster) & set(found)):
            prompt, difference = prompts[index], found[index]
            is_movable = difference is not None and difference.kind in _MOVABLE
            late = _late_constant(prompt, constant, difference) if difference is None or is_movable else None
            if late is not None:
                yield late
            if difference is None or (late is not None and _is_same_place(difference, late)):
                continue
            is_in_history = is_movable and difference.segment not in SYSTEM_KINDS
            first_change = next((start for start, _ in _changing_runs(prompt.pieces, constant)), len(prompt.pieces))
            if (
                not is_in_history
                or _bytes_after(prompt, first_change, constant)
                or _shares_history(prompt, prompts[earlier[index]])
            ):
                yield difference


def _is_same_place(difference: Difference, late: Difference) -> bool:
    return difference.segment == late.segment and difference.at >= late.at


def _shares_history(prompt: PromptStructure, other: PromptStructure) -> bool:
    """Whether both are of one conversation: by session, else by a long user message after the first difference."""
    if prompt.session and other.session:
        return prompt.session == other.session
    index = first_difference(prompt.pieces, other.pieces)
    at = 0 if index is None else prompt.pieces[index].at
    of_other = {message.hash for message in other.history}
    return any(
        message.kind == "user" and message.at > at and message.length >= LONG_MESSAGE_BYTES and message.hash in of_other
        for message in prompt.history
    )


def _clusters(prompts: Sequence[PromptStructure], pairs: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Indices of prompts that share text, directly or through others."""
    first = list(range(len(prompts)))  # of the cluster of each prompt
    for index, earlier in pairs:
        if prompts[index].shared_bytes(prompts[earlier]) >= MIN_STABLE_BYTES:
            first[index] = first[earlier]
    members: Mapping[int, list[int]] = defaultdict(list)
    for index, leader in enumerate(first):
        members[leader].append(index)
    return list(members.values())


def _constant_hashes(prompts: Sequence[PromptStructure]) -> frozenset[str]:
    """Hashes of the constant pieces; none of too few prompts or conversations."""
    names = _conversations(prompts)
    conversations = len(set(names))
    if len(prompts) < MIN_PROMPTS or conversations < MIN_CONVERSATIONS:
        return frozenset()
    contained = [
        (name, hashed)
        for name, prompt in zip(names, prompts, strict=True)
        for hashed in prompt.piece_hashes | {piece.hash for piece in prompt.tail}
    ]
    in_prompts = Counter(hashed for _, hashed in contained)
    in_conversations = Counter(hashed for _, hashed in set(contained))
    return frozenset(
        hashed
        for hashed, count in in_prompts.items()
        if count >= CONSTANT_SHARE * len(prompts) and in_conversations[hashed] >= CONSTANT_SHARE * conversations
    )


def _conversations(prompts: Sequence[PromptStructure]) -> list[str]:
    """Identifies the conversation of each prompt: its session, else its first segment that few prompts contain."""
    counts = Counter(hashed for prompt in prompts for hashed in {segment.hash for segment in prompt.segments})
    limit = CONSTANT_SHARE * len(prompts)
    return [
        prompt.session or next((segment.hash for segment in prompt.segments if counts[segment.hash] < limit), "")
        for prompt in prompts
    ]


def _late_constant(
    prompt: PromptStructure, constant: frozenset[str], difference: Difference | None
) -> Difference | None:
    """The first changing text, with the bytes of constant pieces after it; None if nearly all of these come first."""
    for start, end in _changing_runs(prompt.pieces, constant) if constant else ():
        first, run = prompt.pieces[start], prompt.pieces[start:end]
        segment = prompt.segment_of(first)
        is_long = len(run) >= MIN_CHANGING_PIECES and sum(piece.length for piece in run) >= MIN_CHANGING_BYTES
        is_token = difference is not None and difference.kind is not Kind.OTHER and difference.segment == segment.kind
        if is_long or (segment.kind not in SYSTEM_KINDS and not is_token):
            after = _bytes_after(prompt, end, constant)
            return Difference(Kind.ORDER, segment.kind, first.at - segment.at, after) if after else None
    return None


def _bytes_after(prompt: PromptStructure, start: int, constant: frozenset[str]) -> int:
    """Bytes of constant pieces from piece ``start`` on that are not also before it; 0 below ``MIN_STABLE_BYTES``."""
    before = {piece.hash for piece in prompt.pieces[:start]}
    later = (*prompt.pieces[start:], *prompt.tail)
    found = sum(piece.length for piece in later if piece.hash in constant and piece.hash not in before)
    return found if found >= MIN_STABLE_BYTES else 0


def _changing_runs(pieces: Sequence[Piece], constant: frozenset[str]) -> Iterator[tuple[int, int]]:
    """(start, end) of each run of pieces that are not constant."""
    start = 0
    for end, piece in enumerate(pieces):
        if piece.hash in constant:
            if start < end:
                yield start, end
            start = end + 1
    if start < len(pieces):
        yield start, len(pieces)
