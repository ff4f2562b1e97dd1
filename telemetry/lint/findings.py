"""Lint findings of a task group: what prevents prompts from sharing a prefix, and what changing them would bring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from telemetry.lint.alignment import Alignment, alignment
from telemetry.lint.differences import Difference, Kind, compare, most_similar
from telemetry.lint.order import MIN_STABLE_BYTES, with_late_constants
from telemetry.lint.structure import BYTES_PER_TOKEN, PromptStructure

MIN_PAIRS = 3  # pairs with the same difference for a finding
MIN_SHARE = 0.05  # of all pairs, for a finding
MAX_DROPPED = 1 / 3  # of a history, at once: more is not a truncation message by message
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of tokens that are computed again."""

    kind: Kind
    segment: str
    at_tokens: int  # estimated tokens into the segment, minimum of all pairs; of an alignment: into the prompt
    stable_tokens: int  # shared tokens that follow, median; of an alignment: tokens before it in the unfinished block
    share: float  # of the compared pairs
    pairs: int  # compared pairs
    tokens_per_day: float | None  # recomputed because of it; None: request rate unknown
    detail: str = ""  # advice with figures, instead of the kind's

    @property
    def where(self) -> str:
        return place(self.kind, self.segment, self.at_tokens)

    @property
    def what(self) -> str:
        return KIND_TEXTS[self.kind]

    @property
    def effect(self) -> str:
        """What cannot be shared, as the predicate of a sentence about tokens."""
        return EFFECTS.get(self.kind, "identical tokens after it cannot be shared")

    @property
    def advice(self) -> str:
        return self.detail or ADVICE[self.kind]


KIND_TEXTS = {
    Kind.DATE: "a date or time",
    Kind.EPOCH: "a time in seconds",
    Kind.UUID: "a UUID",
    Kind.HEX: "a hexadecimal id",
    Kind.ID: "an id",
    Kind.COUNTER: "a changing number",
    Kind.REORDERED: "the same text in another order",
    Kind.TOOLS: "a different tool list",
    Kind.TRUNCATED: "a history without its oldest messages",
    Kind.ORDER: "changing text before constant text",
    Kind.ALIGNMENT: "a shared beginning that ends inside a cache block",
    Kind.OTHER: "changing text",
}
EFFECTS = {
    Kind.TRUNCATED: "identical tokens of the history cannot be shared",
    Kind.ORDER: "constant tokens after it cannot be shared",
    Kind.ALIGNMENT: "of its tokens are not cached, because engines cache whole blocks",
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
    Kind.ORDER: "Put constant text (instructions, tools, examples) first: before the history, retrieved text and the "
    "user's text.",
    Kind.ALIGNMENT: "Change its length to a whole number of blocks.",
    Kind.OTHER: f"{_MOVE_LATER}.",
}


SEGMENT_NAMES = {"system": "system prompt", "developer": "developer message", "prompt": "prompt", "other": "message"}


def place(kind: Kind, segment: str, at_tokens: int) -> str:
    """The position of a difference, as text."""
    if kind is Kind.TRUNCATED:
        return "at the beginning of the history"
    if kind is Kind.ALIGNMENT:
        return f"about {at_tokens:,} tokens into the prompt"
    if segment == "tools":
        return "in the tool list"
    name = SEGMENT_NAMES.get(segment, f"{segment} message")
    return f"at the beginning of the {name}" if at_tokens < 2 else f"in the {name}, about {at_tokens} tokens in"


def describe(difference: Difference) -> str:
    """A difference as the predicate of a sentence about prompts."""
    if difference.kind is Kind.TOOLS:
        return f"have {KIND_TEXTS[difference.kind]}"
    return f"have {KIND_TEXTS[difference.kind]} {place(difference.kind, difference.segment, difference.at_tokens)}"


def lint(prompts: Sequence[PromptStructure], requests_per_s: float | None) -> list[Finding]:
    """Findings, worst first; ``prompts`` in order of time."""
    pairs = list(most_similar(prompts))
    found = {index: compare(prompts[index], prompts[earlier]) for index, earlier in pairs}
    by_cause: dict[tuple[Kind, str], list[Difference]] = defaultdict(list)
    for difference in with_late_constants(prompts, pairs, found):
        if _is_costly(difference):
            by_cause[difference.kind, difference.segment].append(difference)
    findings = [_finding(same_cause, len(pairs), requests_per_s) for same_cause in by_cause.values()]
    relevant = [item for item in findings if item.share * item.pairs >= MIN_PAIRS and item.share >= MIN_SHARE]
    if (unaligned := alignment(prompts)) is not None:
        relevant.append(_alignment_finding(unaligned, len(prompts), requests_per_s))
    return sorted(relevant, key=lambda item: item.share * item.stable_tokens, reverse=True)


def _is_costly(difference: Difference) -> bool:
    """Whether enough text is lost, and not by a truncation in big steps, which is as it should be."""
    history_bytes = difference.stable_bytes + difference.dropped_bytes
    return difference.stable_bytes >= MIN_STABLE_BYTES and difference.dropped_bytes <= MAX_DROPPED * history_bytes


def _finding(same_cause: Sequence[Difference], pairs: int, requests_per_s: float | None) -> Finding:
    first = same_cause[0]
    stable_tokens = _median([difference.stable_tokens for difference in same_cause])
    share = len(same_cause) / pairs
    at_tokens = min(difference.at_tokens for difference in same_cause)
    detail = _truncation_advice(same_cause, stable_tokens) if first.kind is Kind.TRUNCATED else ""
    per_day = _per_day(stable_tokens, share, requests_per_s)
    return Finding(first.kind, first.segment, at_tokens, stable_tokens, share, pairs, per_day, detail)


def _per_day(tokens: float, share: float, requests_per_s: float | None) -> float | None:
    return None if requests_per_s is None else tokens * share * requests_per_s * DAY_S


def _median(values: Sequence[int]) -> int:
    return sorted(values)[len(values) // 2]


def _truncation_advice(same_cause: Sequence[Difference], stable_tokens: int) -> str:
    """A history that is cut to half when it is full loses half once per as many turns as that half has."""
    messages_of_turn = 2
    per_turn = _median(
        [
            round(difference.dropped_bytes / max(1.0, difference.dropped_messages / messages_of_turn) / BYTES_PER_TOKEN)
            for difference in same_cause
        ]
    )
    return (
        "Drop half of the history at once when it is full, or replace that half by a summary, instead of a message or "
        f"two with each turn: about {per_turn:,} tokens a request are then computed again instead of {stable_tokens:,}."
    )


def _alignment_finding(found: Alignment, prompts: int, requests_per_s: float | None) -> Finding:
    lost, block = found.lost_tokens, found.block_tokens
    share = found.prompts / prompts
    whole = found.shared_tokens - lost
    detail = (
        f"A block has {block:,} tokens. Pad the beginning by about {block - lost:,} tokens to {whole + block:,}, or "
        f"trim it by {lost:,} to {whole:,} (± {found.margin_tokens:,})."
    )
    per_day = _per_day(lost, share, requests_per_s)
    return Finding(Kind.ALIGNMENT, found.segment, found.shared_tokens, lost, share, prompts, per_day, detail)
