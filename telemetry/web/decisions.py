"""Placement decisions on pages: their names in URLs, and texts that explain them.

Reasons and match kinds are those of ``routing/types.py``. A newer router may send one that is unknown here; it is then
shown as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from telemetry.metrics.router import REASONS
from telemetry.metrics.windows import cacheable_tokens
from telemetry.models import Decision

MATCHES = {
    "header": "named in the X-Task-Group header",
    "api_key": "matched by the client's key",
    "session": "matched by the session key",
    "tier1": "matched by the tier-1 prefix",
    "model": "matched by the model",
    "unmatched": "matched by no task group",
}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def reason_label(reason: str) -> str:
    """A reason in one to three words."""
    return REASONS[reason][0] if reason in REASONS else reason


def reason_text(reason: str) -> str:
    """A reason as a sentence about the chosen replica; "" if it is unknown here."""
    return REASONS[reason][1] if reason in REASONS else ""


def place_of(decision: Decision) -> str:
    """A decision in a URL: time in microseconds, router, sequence number and boot."""
    return f"{(decision.at - _EPOCH) // timedelta(microseconds=1)}-{decision.router_id}-{decision.seq}-{decision.boot}"


def parse_place(text: str) -> tuple[datetime, int, str, int] | None:
    """(time, router, boot, sequence number) of ``place_of``'s result; None for any other text."""
    *numbers, boot = text.split("-", 3)
    if len(numbers) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 17 for part in numbers):
        return None
    micros, router_id, seq = map(int, numbers)
    try:
        return _EPOCH + timedelta(microseconds=micros), router_id, boot, seq
    except OverflowError:
        return None


def cached_ratio(decision: Decision) -> float | None:
    """Cached tokens / prompt tokens; None if the response did not report them."""
    tokens, cached = decision.prompt_tokens, decision.cached_tokens
    return cached / tokens if tokens and cached is not None else None


def predicted_ratio(decision: Decision) -> float | None:
    """Predicted cached tokens / prompt tokens, estimated if not reported; None if the strategy does not predict."""
    tokens, hit = decision.prompt_tokens or decision.prompt_tokens_estimate, decision.hit_tokens
    return min(1.0, hit / tokens) if hit is not None and tokens else None


def block_limit_ratio(decision: Decision) -> float | None:
    """The largest possible ``cached_ratio``: hits end on a block, and the last token is always computed."""
    tokens, block = decision.prompt_tokens, decision.block_tokens
    return cacheable_tokens(tokens, block) / tokens if tokens and block else None


def comparison_text(decision: Decision) -> str:
    """How the prediction and the response compare, as a sentence."""
    tokens, cached = decision.prompt_tokens, decision.cached_tokens
    if decision.status is not None and decision.status >= 400:
        return _failure_text(decision.status)
    if cached is None or not tokens:
        return "The response did not report cached tokens, so it is not known whether the cache was used."
    reported = f"{cached:,} of {tokens:,} prompt tokens came from the cache"
    if decision.hit_tokens is None:
        return f"{reported}. The strategy {decision.strategy} makes no prediction."
    difference = cached - predicted_tokens(decision)
    if abs(difference) <= 0.05 * tokens:
        return f"{reported}, as predicted."
    if difference < 0:
        return f"{reported}, {-difference:,} fewer than predicted: they were evicted or never computed on this replica."
    untracked = "outputs, a part of a block, a cache tier beside the engine's, or prompts that it did not place"
    return f"{reported}, {difference:,} more than predicted: a router does not track {untracked}."


def _failure_text(status: int) -> str:
    if status >= 500:
        return f"The request failed with status {status}, so it is not known whether the cache was used."
    why = "the engine does not serve the model that the request names" if status == 404 else "the request is invalid"
    return f"Rejected with status {status}, usually because {why}. No prompt was computed."


def predicted_tokens(decision: Decision) -> int:
    """The predicted cached tokens, at most those of the prompt if they are known."""
    hit, tokens = decision.hit_tokens or 0, decision.prompt_tokens
    return hit if tokens is None else min(tokens, hit)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that was eligible for a request, with its load at that time."""

    name: str
    chosen: bool
    running: int
    waiting_tokens: int
    hit_tokens: int | None  # predicted; None if the strategy does not predict or it was not recorded
    cost: float | None  # as the strategy compares it; the lowest is chosen


def candidates_of(decision: Decision) -> list[Candidate]:
    """The candidates: the chosen one first, then by cost and load. [] if they were not recorded."""
    candidates = [
        Candidate(
            str(row.get("replica", "")),
            row.get("replica") == decision.replica,
            int(row.get("running", 0)),
            int(row.get("waiting_tokens", 0)),
            row.get("hit_tokens"),
            row.get("cost"),
        )
        for row in decision.candidates or ()
        if isinstance(row, dict)
    ]
    return sorted(
        candidates, key=lambda row: (not row.chosen, row.cost is None, row.cost or 0.0, row.running, row.name)
    )
