"""Another revision of a policy places requests, and places them worse."""

from __future__ import annotations

from dataclasses import dataclass

from telemetry.causes.cause import CauseKind, Finding, percent
from telemetry.causes.evidence import LITTLE, Evidence, Happening, Route, Sums, added, grouped

COMPARED = 0.95  # certainty where the revision before places a part of the traffic still, and does better
BEFORE_AND_AFTER = 0.85
UNSEEN = 0.5  # the same where no event says so
GROWN = 0.1  # of the tokens: a revision that has so much more than before is new
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


def rolled(evidence: Evidence) -> list[Rolled]:
    """Revisions whose part of the tokens grew."""
    by_now, by_before = (grouped(side.routes, _key) for side in (evidence.now, evidence.before))
    all_now, all_before = evidence.now.total.prompt or 1.0, evidence.before.total.prompt or 1.0
    found = []
    for key, sums in by_now.items():
        share = sums.prompt / all_now
        had = by_before.get(key, Sums()).prompt / all_before
        if key[0] and share - had >= GROWN:
            found.append(Rolled(*key, sums, _usual(evidence, key), _beside(evidence, key), share))
    return found


def judge(evidence: Evidence) -> Finding | None:
    """By the tokens that the revision's requests lost; beside the revision before it where both place requests."""
    found = rolled(evidence)
    if not found:
        return None
    worst = max(found, key=lambda it: it.sums.lost(it.usual))
    events = [it for it in evidence.what(*EVENTS) if it.revision == worst.revision and it.policy == worst.policy]
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
            "events": [it.summary for it in events],
        },
    )


def _key(route: Route) -> Key:
    return route.policy, route.revision


def _usual(evidence: Evidence, key: Key) -> float | None:
    groups = {route.group for route in evidence.now.routes if _key(route) == key}
    return added(route.sums for route in evidence.before.routes if route.group in groups).rate


def _beside(evidence: Evidence, key: Key) -> float | None:
    others = added(route.sums for route in evidence.now.routes if route.policy == key[0] and route.revision != key[1])
    return others.rate if others.prompt > 5 * LITTLE * evidence.now.total.prompt else None


def _certainty(evidence: Evidence, worst: Rolled, events: list[Happening]) -> float:
    fits = max((evidence.fits(it) for it in events), default=UNSEEN)
    return (COMPARED if worst.beside is not None else BEFORE_AND_AFTER) * fits


def _of_placing(evidence: Evidence) -> float | None:
    """Tokens that placing may have lost: what fell below the capacity's rung; None without a ladder."""
    return evidence.grown("capacity", "delivered")
