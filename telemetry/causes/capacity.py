"""What is used in common no longer fits into the caches: it is evicted before it comes again."""

from __future__ import annotations

from telemetry.causes.affinity_given_up import away_from_home, spilled_tokens
from telemetry.causes.cause import CauseKind, Finding, percent
from telemetry.causes.evidence import Evidence, Side
from telemetry.causes.replica_added import joined
from telemetry.causes.replica_lost import lost
from telemetry.causes.replica_restarted import restarted
from telemetry.causes.revision import rolled

CERTAINTY = 0.9
WITHOUT_LADDER, WITH_PRESSURE = 0.45, 0.65
BY_ANOTHER = 0.4  # of that, where a replica was lost: then there is less cache, not more to keep
GROWN = 0.02  # of the tokens


def judge(evidence: Evidence) -> Finding | None:
    """By the rungs W - C of the ladder; without it by known openings that hit less, though nothing moved them."""
    grown = evidence.grown("reachable", "capacity")
    if grown is not None:
        tokens, certainty = grown, CERTAINTY
    else:
        tokens = (_lost_at_home(evidence) or 0.0) + _lost_elsewhere(evidence)
        certainty = WITH_PRESSURE if _pressed(evidence) else WITHOUT_LADDER
    if tokens < GROWN * evidence.now.total.prompt:
        return None
    if lost(evidence)[0]:
        certainty *= BY_ANOTHER
    usage, before = _kv_usage(evidence.now), _kv_usage(evidence.before)
    gap, usual = evidence.now.gap("reachable", "capacity"), evidence.before.gap("reachable", "capacity")
    said = (
        f"The fleet's caches hold too little of what comes again: {percent(gap)} of the tokens are lost to it, "
        f"{percent(usual)} before."
        if gap is not None
        else "Known prompts hit less, and nothing sent them elsewhere: caches drop them before they come again."
    )
    return Finding(
        CauseKind.CAPACITY,
        tokens,
        certainty,
        said,
        "Give the engines more KV cache (memory, a quantised cache, offloading to the host), add replicas, or send "
        "fewer task groups to each replica. The capacity curve of the pool shows what each would bring.",
        {"gap_ratio": gap, "usual_gap_ratio": usual, "kv_usage_ratio": usage, "usual_kv_usage_ratio": before},
    )


def _kv_usage(side: Side) -> float | None:
    known = [it.kv_usage_ratio for it in side.engines if it.kv_usage_ratio is not None]
    return sum(known) / len(known) if known else None


def _pressed(evidence: Evidence) -> bool:
    now, before = (sum(it.preemptions or 0.0 for it in side.engines) / side.seconds for side in
                   (evidence.now, evidence.before))  # fmt: skip
    usage, usual = _kv_usage(evidence.now), _kv_usage(evidence.before)
    return now > 2 * before or (usage is not None and usual is not None and usage > usual + 0.1)


def _lost_at_home(evidence: Evidence) -> float | None:
    if not evidence.before.prefixes or not evidence.now.prefixes:
        return None
    homes, usual, away = evidence.before.homes, evidence.before.by_prefix, set(restarted(evidence))
    parts = (
        max(it.sums.lost(usual[it.group, it.prefix].rate), 0.0)
        for it in evidence.now.prefixes
        if it.replica == homes.get((it.group, it.prefix)) and it.replica not in away
    )
    return sum(parts) * evidence.now.sampled


def _lost_elsewhere(evidence: Evidence) -> float:
    """Tokens that known openings lost at other replicas though these did not spill: nobody held them any more.

    0 where replicas or a revision may have sent them there.
    """
    moved = lost(evidence)[0] or joined(evidence)[0] or restarted(evidence)
    if moved or any(not it.did_well for it in rolled(evidence)):
        return 0.0
    return max((away_from_home(evidence) or 0.0) - spilled_tokens(evidence), 0.0)
