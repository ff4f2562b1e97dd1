"""Why a router chose a replica, and how a request was told to its task group, in words; the routers' own are in
routing/types.py. A router may be newer than this: a word that is not here stands for itself.

How addresses name a decision.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from telemetry.models import Decision

REASONS = {
    "affinity": ("Affinity", "It is the home that the prefix names, and it had room."),
    "spill": ("Spill", "The homes before it were full: affinity was given up for load."),
    "no_key": ("No key", "The request has no key to place it by; it was the least loaded."),
    "least_load": ("Least load", "It had the least to do."),
    "round_robin": ("Round robin", "It was its turn."),
    "random": ("Random", "Chance."),
    "less_of_two": ("Less of two", "Of two drawn by chance it had less to do."),
    "hot": ("Hot", "It is one of those that the hot opening has to itself."),
    "hit": ("Hit", "It was preferred or cheapest, and held some of the prompt."),
    "elsewhere": (
        "Elsewhere",
        "Another replica held more of the prompt and had too much to do: warmth was given up for load.",
    ),
    "spread": (
        "Spread",
        "Another replica held more of the prompt, but had more than its share of requests of late: warmth was copied.",
    ),
    "cold": ("Cold", "Nobody held as much of the prompt as would count."),
}
MATCHES = {
    "header": "the X-Task-Group header names it",
    "api_key": "the client's key is good for it",
    "session": "it claims how the session key begins",
    "tier1": "it claims the hash of the opening",
    "model": "it claims the model",
    "unmatched": "no task group claims the request",
}


def reason_label(reason: str) -> str:
    """In a word or two."""
    return REASONS[reason][0] if reason in REASONS else reason


def reason_sentence(reason: str) -> str:
    """As a sentence about the replica; "" for a reason that is not known here."""
    return REASONS[reason][1] if reason in REASONS else ""


def verdict_of(one: Decision) -> str:
    """How the prediction and the answer fit, as a sentence."""
    if one.cached_tokens is None or not one.prompt_tokens:
        return "The answer did not say how many tokens came from the cache, so whether it hit is not known."
    delivered = f"{one.cached_tokens:,} of {one.prompt_tokens:,} prompt tokens came from the cache"
    if one.hit_tokens is None:
        return f"{delivered}. The strategy {one.strategy} predicts no hit."
    off = one.cached_tokens - predicted_tokens(one)
    if abs(off) <= 0.05 * one.prompt_tokens:
        return f"{delivered}, as predicted."
    if off < 0:
        return f"{delivered}, {-off:,} fewer than predicted: they were evicted, or never computed there."
    return f"{delivered}, {off:,} more than predicted: another router or a shared tier had warmed it."


def predicted_tokens(one: Decision) -> int:
    """The predicted hit in tokens of the prompt as the engine counted it; the estimate where it did not."""
    hit, estimate = one.hit_tokens or 0, one.prompt_tokens_estimate
    return min(one.prompt_tokens, round(hit * one.prompt_tokens / estimate)) if one.prompt_tokens and estimate else hit


EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def place_of(one: Decision) -> str:
    """A decision as an address names it: time in microseconds, router, boot, number."""
    return f"{(one.at - EPOCH) // timedelta(microseconds=1)}-{one.router_id}-{one.seq}-{one.boot}"


def read_place(text: str) -> tuple[datetime, int, str, int] | None:
    """The other way; None for a text that is no place."""
    *numbers, boot = text.split("-", 3)
    if len(numbers) != 3 or not all(part.isascii() and part.isdigit() and len(part) < 17 for part in numbers):
        return None
    moment, router_id, seq = map(int, numbers)
    try:
        return EPOCH + timedelta(microseconds=moment), router_id, boot, seq
    except OverflowError:
        return None
