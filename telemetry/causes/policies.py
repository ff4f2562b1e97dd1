"""Another revision of a policy places requests, and places them worse.

Replicas are so busy that requests go where their prompt is not warm.

Routers expect hits that engines do not deliver: they hold less than routers believe.
"""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.causes.cause import CauseKind, Finding, listed, percent
from telemetry.causes.evidence import LITTLE, Evidence, RelatedEvent, Route, Sums, added, grouped
from telemetry.causes.replicas import joined, lost, restarted

COMPARED = 0.95  # certainty where the revision before places a part of the traffic still, and does better
BEFORE_AND_AFTER = 0.85
UNSEEN = 0.5  # the same where no event says so
REVISION_GROWTH = 0.1  # of the tokens: a revision that has so much more than before is new
DID_WELL = 0.3  # of the certainty, of one that placed requests before the rate fell, and hit as usual
AFTER_S = 30.0  # so long before the fall at least, its events did nothing where it did well since
FEW = 50  # requests that do not yet show how a revision does
AS_USUAL, PART = 0.03, 1 / 3  # so far below what is usual a hit rate is still that, or by that part of the fall
EVENTS = frozenset({"policy_published", "rollout_started", "rollout_begun", "rollout_widened", "rollout_completed"})
Key = tuple[str, int]  # policy and revision


@dataclass(frozen=True, slots=True)
class Rolled:
    """A revision that places what another one did."""

    policy: str
    revision: int
    sums: Sums
    usual: float | None  # hit rate of the same task groups before
    beside: float | None  # that of the same policy's other revisions now; None where they place next to nothing
    share: float  # of all tokens
    did_well: bool  # it placed requests before the rate fell, and hit as usual


def rolled(evidence: Evidence) -> list[Rolled]:
    """Revisions whose part of the tokens grew: what may be to blame."""
    by_now, by_before = (grouped(side.routes, _key) for side in (evidence.now, evidence.before))
    all_now, all_before = evidence.now.total.prompt or 1.0, evidence.before.total.prompt or 1.0
    found = []
    for key, sums in by_now.items():
        share = sums.prompt / all_now
        had = by_before.get(key, Sums()).prompt / all_before
        if key[0] and share - had >= REVISION_GROWTH:
            usual, beside, did_well = _usual(evidence, key), _beside(evidence, key), _did_well(evidence, key)
            found.append(Rolled(*key, sums, usual, beside, share, did_well))
    return found


def judge_revision(evidence: Evidence) -> Finding | None:
    """By the tokens that the revision's requests lost; beside the revision before it where both place requests."""
    found = [it for it in rolled(evidence) if not _is_cleared(evidence, it)]
    if not found:
        return None
    worst = max(found, key=lambda it: it.sums.lost(it.usual) * (DID_WELL if it.did_well else 1.0))
    events = _events(evidence, worst)
    usual = worst.usual if worst.beside is None else worst.beside
    tokens = max(worst.sums.lost(usual), 0.0)
    ladder = _of_placing(evidence)
    if ladder is not None:
        tokens = min(tokens, max(ladder, 0.0))
    return Finding(
        CauseKind.REVISION,
        tokens,
        _certainty(evidence, worst, events),
        f"Revision {worst.revision} of policy {worst.policy} places {percent(worst.share)} of the tokens and hits "
        f"{percent(worst.sums.rate)} instead of {percent(usual)}.",
        f"Go back to the revision before {worst.revision}, or try both on a part of the traffic, with a guard.",
        {
            "policy": worst.policy,
            "revision": worst.revision,
            "share_ratio": round(worst.share, 3),
            "beside_ratio": worst.beside,
            "did_well_before": worst.did_well,
            "events": [it.summary for it in events],
        },
    )


def _events(evidence: Evidence, of: Rolled) -> list[RelatedEvent]:
    return [it for it in evidence.what(*EVENTS) if it.revision == of.revision and it.policy == of.policy]


def _is_cleared(evidence: Evidence, of: Rolled) -> bool:
    """Whether it hit as usual from its last event on until the rate fell: then the fall is not its doing."""
    events = _events(evidence, of)
    limit = evidence.changed_since(AFTER_S)
    return of.did_well and bool(events) and all(it.at < limit for it in events)


def _key(route: Route) -> Key:
    return route.policy, route.revision


def _usual(evidence: Evidence, key: Key) -> float | None:
    groups = {route.group for route in evidence.now.routes if _key(route) == key}
    return added(route.sums for route in evidence.before.routes if route.group in groups).rate


def _did_well(evidence: Evidence, key: Key) -> bool:
    """Whether its requests from before the rate fell hit as those of the revisions before it."""
    before = evidence.before.routes
    own = added(route.sums for route in before if _key(route) == key)
    groups = {route.group for route in before if _key(route) == key}
    others = added(route.sums for route in before if _key(route) != key and route.group in groups)
    if own.requests < FEW or own.rate is None or others.rate is None:
        return False
    now = added(route.sums for route in evidence.now.routes if _key(route) == key).rate
    fall = 0.0 if now is None else others.rate - now
    return own.rate >= others.rate - max(AS_USUAL, PART * fall)


def _beside(evidence: Evidence, key: Key) -> float | None:
    others = added(route.sums for route in evidence.now.routes if route.policy == key[0] and route.revision != key[1])
    return others.rate if others.prompt > 5 * LITTLE * evidence.now.total.prompt else None


def _certainty(evidence: Evidence, worst: Rolled, events: list[RelatedEvent]) -> float:
    fits = max((evidence.fits(it) for it in events), default=UNSEEN)
    certainty = COMPARED if worst.beside is not None else BEFORE_AND_AFTER
    return certainty * fits * (DID_WELL if worst.did_well else 1.0)


def _of_placing(evidence: Evidence) -> float | None:
    """Tokens that placing may have lost: what fell below the capacity's rung; None without a ladder."""
    return evidence.grown("capacity", "delivered")


CERTAINTY = 0.9
WITHOUT_LADDER = 0.75
BY_ANOTHER = 0.4  # of that, where a replica was lost or joined, or another revision decides: these spill, too
OVERFLOW_GROWTH = 0.04  # of the requests: spilling that much more is worth a word
LONGER = 1.5  # times the mean's tokens, at most, of the requests that spill


def judge_overflow(evidence: Evidence) -> Finding | None:
    """By the rungs B - Q of the ladder, else by what openings lost at replicas that are not their home."""
    now, before = evidence.now.total.spilled_ratio, evidence.before.total.spilled_ratio
    grown = evidence.grown("best", "predicted")
    if now is None or now - (before or 0.0) < OVERFLOW_GROWTH:
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


STALE_GROWTH = 0.03  # of the tokens


def judge_stale_index(evidence: Evidence) -> Finding | None:
    """By predicted and delivered tokens of the same answers, leaving out replicas that restarted."""
    skipped = set(restarted(evidence))
    gaps = {name: _grown(evidence, name) for name in evidence.now.by_replica if name not in skipped}
    worse = {name: tokens for name, tokens in gaps.items() if tokens is not None and tokens > 0}
    tokens = sum(worse.values())
    now, before = _gap(evidence.now.total), _gap(evidence.before.total)
    if now is None or tokens < STALE_GROWTH * evidence.now.total.prompt:
        return None
    names = sorted(worse, key=lambda name: worse[name], reverse=True)
    return Finding(
        CauseKind.INDEX_STALE,
        tokens,
        CERTAINTY,
        f"Routers predict {percent(now)} of the prompt tokens more than engines find cached; before, it was "
        f"{percent(before or 0.0)}. Most of it at {listed(names)}.",
        "Look whether something else uses these engines (requests that do not come through a router, other "
        "adapters), whether they have less cache than their replica says, and whether their KV events arrive.",
        {"gap_ratio": round(now, 4), "usual_gap_ratio": before and round(before, 4), "replicas": names},
    )


def _grown(evidence: Evidence, replica: str) -> float | None:
    now = evidence.now.by_replica[replica]
    gap, usual = _gap(now), _gap(evidence.before.by_replica.get(replica, Sums()))
    if usual is None:
        usual = _gap(evidence.before.total)
    return None if gap is None or usual is None else (gap - max(usual, 0.0)) * now.predicted_prompt


def _gap(sums: Sums) -> float | None:
    """Predicted less delivered, of the prompt tokens with a prediction."""
    return (sums.predicted - sums.predicted_cached) / sums.predicted_prompt if sums.predicted_prompt else None
