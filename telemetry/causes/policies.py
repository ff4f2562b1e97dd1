"""Causes in the placement of requests: a worse revision, overflow to other replicas, and a stale residency index."""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.causes.evidence import (
    MIN_TOKEN_SHARE,
    REVISION_EVENTS,
    CauseKind,
    Evidence,
    Finding,
    RelatedEvent,
    RevisionFacts,
    Route,
    Sums,
    names_text,
    percent,
    sum_by,
    total,
)
from telemetry.causes.replicas import added_replicas, lost_replicas, restarted_replicas

SIDE_BY_SIDE = 0.95  # certainty if another revision of the policy still places a part of the traffic, and better
BEFORE_AND_AFTER = 0.85
NO_EVENT = 0.5  # factor if no event names the revision
REVISION_GROWTH = 0.1  # of the tokens: growth of a revision's share that may matter
HIT_AS_USUAL = 0.3  # factor for a revision that placed requests before the drop and hit as usual
CLEARED_AFTER_S = 30.0  # a revision that hit as usual for at least this long after its last event is not the cause
MIN_REVISION_REQUESTS = 50  # a revision with fewer requests before the drop has no rate of its own
USUAL_TOLERANCE = 0.03  # below the baseline rate that still counts as usual, 0 to 1
USUAL_TOLERANCE_OF_FALL = 1 / 3  # the same as a part of the fall; the larger tolerance applies
MAX_REASON = 120  # characters of the reason of a revision in a sentence
Key = tuple[str, int]  # policy and revision


@dataclass(frozen=True, slots=True)
class GrownRevision:
    """A revision whose share of the traffic grew."""

    policy: str
    revision: int
    sums: Sums
    baseline: float | None  # hit rate of the same task groups before
    other_rate: float | None  # hit rate of the policy's other revisions now; None if they place almost nothing
    share: float  # of all tokens
    hit_as_usual: bool  # it placed requests before the drop and hit as usual


def grown_revisions(evidence: Evidence) -> list[GrownRevision]:
    """Revisions whose share of the traffic grew, so that they may be the cause."""
    now, before = (sum_by(period.routes, _key) for period in (evidence.now, evidence.before))
    all_now, all_before = evidence.now.total.prompt or 1.0, evidence.before.total.prompt or 1.0
    grown = []
    for key, sums in now.items():
        share = sums.prompt / all_now
        if key[0] and share - before.get(key, Sums()).prompt / all_before >= REVISION_GROWTH:
            baseline, other_rate = _baseline_rate(evidence, key), _other_revisions_rate(evidence, key)
            grown.append(GrownRevision(*key, sums, baseline, other_rate, share, _hit_as_usual(evidence, key)))
    return grown


def check_revision(evidence: Evidence) -> Finding | None:
    """Measured by the tokens that the revision's requests lost, relative to other revisions if both place requests."""
    suspects = [revision for revision in grown_revisions(evidence) if not _is_cleared(evidence, revision)]
    if not suspects:
        return None
    worst = max(suspects, key=lambda it: it.sums.lost(it.baseline) * (HIT_AS_USUAL if it.hit_as_usual else 1.0))
    others = "" if worst.other_rate is None else f", that of the policy's other revisions {percent(worst.other_rate)}"
    events, facts = _events(evidence, worst), evidence.revisions.get((worst.policy, worst.revision))
    baseline = worst.baseline if worst.other_rate is None else worst.other_rate
    tokens = max(worst.sums.lost(baseline), 0.0)
    lost_by_placement = evidence.gap_growth("capacity", "delivered")
    if lost_by_placement is not None:
        tokens = min(tokens, max(lost_by_placement, 0.0))
    certainty = SIDE_BY_SIDE if worst.other_rate is not None else BEFORE_AND_AFTER
    certainty *= max((evidence.timing_match(event) for event in events), default=NO_EVENT)
    return Finding(
        CauseKind.REVISION,
        tokens,
        certainty * (HIT_AS_USUAL if worst.hit_as_usual else 1.0),
        f"Revision {worst.revision} of policy {worst.policy}{_published(facts)} places "
        f"{percent(worst.share)} of the tokens: hit rate {percent(worst.sums.rate)}{others}.",
        f"Roll back to the revision before {worst.revision}, or roll it out as a canary with a guard.",
        {
            "policy": worst.policy,
            "revision": worst.revision,
            "strategy": facts.strategy if facts else None,
            "author": facts.author if facts else None,
            "reason": facts.reason if facts else None,
            "published_at": facts.published_at.isoformat() if facts and facts.published_at else None,
            "share_ratio": round(worst.share, 3),
            "hour_before_ratio": worst.baseline,
            "other_revisions_ratio": worst.other_rate,
            "normal_before_drop": worst.hit_as_usual,
            "events": [event.summary for event in events],
        },
    )


def _published(facts: RevisionFacts | None) -> str:
    """The strategy of a revision, and who published it, when and why, in brackets."""
    if facts is None:
        return ""
    by = f" by {facts.author}" if facts.author else ""
    at = f" at {facts.published_at:%H:%M:%S} UTC" if facts.published_at else ""
    reason = facts.reason if len(facts.reason) <= MAX_REASON else f"{facts.reason[:MAX_REASON]}…"
    return f" ({facts.strategy}, published{by}{at}{f': {reason}' if reason else ''})"


def _events(evidence: Evidence, revision: GrownRevision) -> list[RelatedEvent]:
    events = evidence.events_of(*REVISION_EVENTS)
    return [event for event in events if event.revision == revision.revision and event.policy == revision.policy]


def _is_cleared(evidence: Evidence, revision: GrownRevision) -> bool:
    """Whether the revision hit as usual from its last event until the drop, and so is not the cause."""
    events, limit = _events(evidence, revision), evidence.event_limit(CLEARED_AFTER_S)
    return revision.hit_as_usual and bool(events) and all(event.at < limit for event in events)


def _key(route: Route) -> Key:
    return route.policy, route.revision


def _baseline_rate(evidence: Evidence, key: Key) -> float | None:
    groups = {route.group for route in evidence.now.routes if _key(route) == key}
    return total(route.sums for route in evidence.before.routes if route.group in groups).rate


def _hit_as_usual(evidence: Evidence, key: Key) -> bool:
    """Whether the revision's requests before the drop hit like those of other revisions in the same task groups."""
    before = evidence.before.routes
    own = total(route.sums for route in before if _key(route) == key)
    groups = {route.group for route in before if _key(route) == key}
    rest = total(route.sums for route in before if _key(route) != key and route.group in groups)
    if own.requests < MIN_REVISION_REQUESTS or own.rate is None or rest.rate is None:
        return False
    now = total(route.sums for route in evidence.now.routes if _key(route) == key).rate
    fall = 0.0 if now is None else rest.rate - now
    return own.rate >= rest.rate - max(USUAL_TOLERANCE, USUAL_TOLERANCE_OF_FALL * fall)


def _other_revisions_rate(evidence: Evidence, key: Key) -> float | None:
    others = total(route.sums for route in evidence.now.routes if route.policy == key[0] and route.revision != key[1])
    return others.rate if others.prompt > 5 * MIN_TOKEN_SHARE * evidence.now.total.prompt else None


CERTAINTY = 0.9
WITHOUT_BREAKDOWN = 0.75
OTHER_CAUSE = 0.4  # factor if a replica was lost or added, or another revision is active: these cause overflow, too
OVERFLOW_GROWTH = 0.04  # of the requests: growth that may matter
MAX_LENGTH_RATIO = 1.5  # of the requests that overflow, in tokens relative to the mean


def check_overflow(evidence: Evidence) -> Finding | None:
    """Measured by the breakdown's loss to load, else by what prefixes lost at other replicas than their main one."""
    now, before = evidence.now.total.overflow_ratio, evidence.before.total.overflow_ratio
    if now is None or now - (before or 0.0) < OVERFLOW_GROWTH:
        return None
    grown = evidence.gap_growth("best", "predicted")
    tokens, certainty = (grown, CERTAINTY) if grown is not None else (lost_by_overflow(evidence), WITHOUT_BREAKDOWN)
    if lost_replicas(evidence)[0] or added_replicas(evidence)[0] or has_new_revision(evidence):
        certainty *= OTHER_CAUSE
    return Finding(
        CauseKind.OVERFLOW,
        tokens,
        certainty,
        f"{percent(now)} of the requests overflowed to another replica because the one with their prefix was too busy; "
        f"before, {percent(before or 0.0)} did.",
        "Add replicas, or let requests wait longer for a replica that has their prefix: a higher alpha (lowest_cost) "
        "or a higher slack_s. Test it on recorded traffic first.",
        {"overflow_ratio": round(now, 4), "baseline_overflow_ratio": before and round(before, 4)},
    )


def has_new_revision(evidence: Evidence) -> bool:
    """Whether a revision that was not as usual before the drop places more of the traffic."""
    return any(not revision.hit_as_usual for revision in grown_revisions(evidence))


def lost_by_overflow(evidence: Evidence) -> float:
    """Tokens that prefixes lost away from their main replica, limited by the growth of overflow.

    A request that goes elsewhere because no replica has its prefix cached does not overflow.
    """
    now, before = evidence.now.total.overflow_ratio or 0.0, evidence.before.total.overflow_ratio or 0.0
    expected = max(now - before, 0.0) * evidence.now.total.prompt * (evidence.before.total.rate or 0.0)
    away = lost_at_other_replicas(evidence)
    return expected if away is None else min(away, MAX_LENGTH_RATIO * expected)


def lost_at_other_replicas(evidence: Evidence) -> float | None:
    """Tokens that known prefixes lost at other replicas than their main one; None if unknown."""
    if not evidence.before.prefixes or not evidence.now.prefixes:
        return None
    main, baseline = evidence.before.main_replicas, evidence.before.by_prefix
    lost = (
        max(prefix.sums.lost(baseline[prefix.group, prefix.prefix].rate), 0.0)
        for prefix in evidence.now.prefixes
        if prefix.replica != main.get((prefix.group, prefix.prefix), prefix.replica)
    )
    return sum(lost) * evidence.now.sample_factor


STALE_GROWTH = 0.03  # of the tokens: growth that may matter


def check_stale_index(evidence: Evidence) -> Finding | None:
    """Measured by predicted and delivered tokens of the same responses, without replicas that restarted."""
    worse = wrongly_predicted(evidence)
    tokens = sum(worse.values())
    now, before = _prediction_gap(evidence.now.total), _prediction_gap(evidence.before.total)
    if now is None or tokens < STALE_GROWTH * evidence.now.total.prompt:
        return None
    names = sorted(worse, key=lambda name: worse[name], reverse=True)
    return Finding(
        CauseKind.INDEX_STALE,
        tokens,
        CERTAINTY,
        f"Routers predict {percent(now)} more of the prompt tokens as cached than engines report; before, it was "
        f"{percent(before or 0.0)}. Most of it at {names_text(names)}.",
        "Check whether other clients use these engines (requests that bypass the router, other adapters), whether they "
        "have less cache than configured for their replica, and whether their KV events arrive.",
        {"gap_ratio": round(now, 4), "baseline_gap_ratio": before and round(before, 4), "replicas": names},
    )


def wrongly_predicted(evidence: Evidence) -> dict[str, float]:
    """Tokens that routers wrongly expected to be cached, more than before, by replica; without those that restarted."""
    restarted = restarted_replicas(evidence)
    growth = {name: _gap_growth(evidence, name) for name in evidence.now.by_replica if name not in restarted}
    return {name: tokens for name, tokens in growth.items() if tokens is not None and tokens > 0}


def _gap_growth(evidence: Evidence, replica: str) -> float | None:
    now = evidence.now.by_replica[replica]
    gap, baseline = _prediction_gap(now), _prediction_gap(evidence.before.by_replica.get(replica, Sums()))
    if baseline is None:
        baseline = _prediction_gap(evidence.before.total)
    return None if gap is None or baseline is None else (gap - max(baseline, 0.0)) * now.predicted_prompt


def _prediction_gap(sums: Sums) -> float | None:
    """Predicted less delivered tokens, relative to the prompt tokens with a prediction."""
    return (sums.predicted - sums.predicted_cached) / sums.predicted_prompt if sums.predicted_prompt else None
