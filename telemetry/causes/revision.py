"""Another revision of a policy places requests, and places them worse."""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.causes.cause import CauseKind, Finding, percent
from telemetry.causes.evidence import LITTLE, Evidence, Happening, Route, Sums, added, grouped

COMPARED = 0.95  # certainty where the revision before places a part of the traffic still, and does better
BEFORE_AND_AFTER = 0.85
UNSEEN = 0.5  # the same where no event says so
GROWN = 0.1  # of the tokens: a revision that has so much more than before is new
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
        if key[0] and share - had >= GROWN:
            usual, beside, did_well = _usual(evidence, key), _beside(evidence, key), _did_well(evidence, key)
            found.append(Rolled(*key, sums, usual, beside, share, did_well))
    return found


def judge(evidence: Evidence) -> Finding | None:
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


def _events(evidence: Evidence, of: Rolled) -> list[Happening]:
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


def _certainty(evidence: Evidence, worst: Rolled, events: list[Happening]) -> float:
    fits = max((evidence.fits(it) for it in events), default=UNSEEN)
    certainty = COMPARED if worst.beside is not None else BEFORE_AND_AFTER
    return certainty * fits * (DID_WELL if worst.did_well else 1.0)


def _of_placing(evidence: Evidence) -> float | None:
    """Tokens that placing may have lost: what fell below the capacity's rung; None without a ladder."""
    return evidence.grown("capacity", "delivered")
