"""Replicas are so busy that requests go where their prompt is not warm."""

from __future__ import annotations

from telemetry.causes.cause import CauseKind, Finding, percent
from telemetry.causes.evidence import Evidence
from telemetry.causes.replica_added import joined
from telemetry.causes.replica_lost import lost
from telemetry.causes.revision import rolled

CERTAINTY = 0.9
WITHOUT_LADDER = 0.75
BY_ANOTHER = 0.4  # of that, where a replica was lost or joined, or another revision decides: these spill, too
GROWN = 0.04  # of the requests: spilling that much more is worth a word
LONGER = 1.5  # times the mean's tokens, at most, of the requests that spill


def judge(evidence: Evidence) -> Finding | None:
    """By the rungs B - Q of the ladder, else by what openings lost at replicas that are not their home."""
    now, before = evidence.now.total.spilled_ratio, evidence.before.total.spilled_ratio
    grown = evidence.grown("best", "predicted")
    if now is None or now - (before or 0.0) < GROWN:
        return None
    tokens, certainty = (grown, CERTAINTY) if grown is not None else (spilled_tokens(evidence), WITHOUT_LADDER)
    if lost(evidence)[0] or joined(evidence)[0] or any(not it.did_well for it in rolled(evidence)):
        certainty *= BY_ANOTHER
    return Finding(
        CauseKind.AFFINITY_GIVEN_UP,
        tokens,
        certainty,
        f"{percent(now)} of the requests went to a replica that is not their prompt's, because that one was too busy; "
        f"before, {percent(before or 0.0)} did.",
        "Add replicas, or let requests wait longer for a warm one: a higher load_factor (prefix_hash, tiered) or a "
        "lower alpha (lowest_cost). Try it on recorded traffic first.",
        {"spilled_ratio": round(now, 4), "usual_spilled_ratio": before and round(before, 4)},
    )


def spilled_tokens(evidence: Evidence) -> float:
    """Tokens that were lost to spilling: what openings lost away from home, and no more than so many requests hit.

    A request that goes elsewhere because nobody holds its prompt any more does not spill.
    """
    now, before = evidence.now.total.spilled_ratio or 0.0, evidence.before.total.spilled_ratio or 0.0
    usual = max(now - before, 0.0) * evidence.now.total.prompt * (evidence.before.total.rate or 0.0)
    away = away_from_home(evidence)
    return usual if away is None else min(away, LONGER * usual)


def away_from_home(evidence: Evidence) -> float | None:
    """Tokens that known openings lost at other replicas than the one they usually had; None unless known."""
    if not evidence.before.prefixes or not evidence.now.prefixes:
        return None
    homes, usual = evidence.before.homes, evidence.before.by_prefix
    parts = (
        max(it.sums.lost(usual[it.group, it.prefix].rate), 0.0)
        for it in evidence.now.prefixes
        if it.replica != homes.get((it.group, it.prefix), it.replica)
    )
    return sum(parts) * evidence.now.sampled
