"""A replica is gone or out of use: what was at home there meets cold caches, and the others have less room each."""

from __future__ import annotations

from telemetry.causes.cause import CauseKind, Finding, listed, percent
from telemetry.causes.evidence import AHEAD_S, LITTLE, Evidence, Happening
from telemetry.causes.replica_restarted import restarted

CERTAINTY = 0.95
UNSEEN = 0.7  # the same where no event says so
LEFT = 0.25  # of its share, at most, of a replica that is gone
LOOK_BACK_S = 2 * AHEAD_S
OUT = frozenset({"replica_down", "replica_removed", "replica_ejected", "replica_unreachable", "replica_state_changed"})
BACK = frozenset({"replica_up", "replica_readmitted", "replica_reachable"})


def lost(evidence: Evidence) -> tuple[list[str], list[Happening]]:
    """Replicas that had their part of the traffic and have next to none, and the events that tell of it."""
    before, now = evidence.before.paces, evidence.now.paces
    had = {name for name, share in before.items() if name and share > LITTLE}
    gone = {name for name in had if now.get(name, 0.0) < LEFT * before[name]}
    since = evidence.changed_since(LOOK_BACK_S)
    events = [it for it in evidence.what(*OUT) if it.at >= since and it.replica in had]
    last = {it.replica: it.kind for it in evidence.what(*OUT, *BACK) if it.at >= since}
    out = {it.replica for it in events if last[it.replica] in OUT}
    names = sorted(((gone & {it.replica for it in events}) | (out & gone) or gone) - set(restarted(evidence)))
    return names, [it for it in events if it.replica in names]


def judge(evidence: Evidence) -> Finding | None:
    """By the tokens that openings lost that were at home there; by its part of the traffic where these are unknown."""
    names, events = lost(evidence)
    if not names:
        return None
    share = sum(evidence.before.paces[name] for name in names)
    tokens = evidence.lost_from(names)
    if tokens is None:
        tokens = min(evidence.lost, share * evidence.now.total.prompt * (evidence.before.total.rate or 0.0))
    certainty = CERTAINTY * max(evidence.fits(it) for it in events) if events else UNSEEN
    return Finding(
        CauseKind.REPLICA_LOST,
        tokens,
        certainty,
        f"{listed(names)} get{'s' if len(names) == 1 else ''} no requests any more and had {percent(share)} of "
        "them: those prompts meet replicas that have not seen them.",
        "Bring it back or replace it. If it is gone on purpose, the rate recovers as the others fill; if it does not, "
        "they have too little cache for all prompts.",
        {"replicas": names, "share_ratio": round(share, 3), "events": [it.summary for it in events]},
    )
