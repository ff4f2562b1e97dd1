"""A replica joined: it is cold, and takes over openings that were warm elsewhere."""

from __future__ import annotations

from telemetry.causes.cause import CauseKind, Finding, listed, percent
from telemetry.causes.evidence import AHEAD_S, LITTLE, Evidence, Happening
from telemetry.causes.replica_restarted import restarted

CERTAINTY = 0.95
HAD = 0.25  # of its share, at most, of a replica that is new
LOOK_BACK_S = 2 * AHEAD_S  # it takes traffic slowly at first
JOINED = frozenset(
    {"replica_added", "replica_adopted", "replica_readmitted", "replica_state_changed", "replica_up", "replicas_found"}
)


def joined(evidence: Evidence) -> tuple[list[str], list[Happening]]:
    """Replicas that have traffic and had next to none, and the events that say why."""
    before, now = evidence.before.paces, evidence.now.paces
    new = {name for name, share in now.items() if name and share > LITTLE and before.get(name, 0.0) < HAD * share}
    since = evidence.changed_since(LOOK_BACK_S)
    events = [it for it in evidence.what(*JOINED) if it.replica in new and it.at >= since]
    names = sorted({it.replica for it in events} - set(restarted(evidence)))
    return names, [it for it in events if it.replica in names]


def judge(evidence: Evidence) -> Finding | None:
    """By the tokens that the new ones lost to what everybody had."""
    names, events = joined(evidence)
    if not names:
        return None
    usual = evidence.before.total.rate
    sums = [evidence.now.by_replica[name] for name in names]
    tokens = sum(max(it.lost(usual), 0.0) for it in sums)
    share = sum(it.prompt for it in sums) / evidence.now.total.prompt
    rate = percent(sum(it.cached for it in sums) / sum(it.prompt for it in sums))
    return Finding(
        CauseKind.REPLICA_ADDED,
        tokens,
        CERTAINTY * max(evidence.fits(it) for it in events),
        f"{listed(names)} joined with an empty cache, took over {percent(share)} of the tokens and "
        f"hit{'s' if len(names) == 1 else ''} {rate} instead of {percent(usual)}.",
        "Nothing, if it recovers: the caches fill as prompts come again. Before adding the next one, switch on the "
        "pool's warm_up, which prefills what a replica will own.",
        {"replicas": names, "share_ratio": round(share, 3), "events": [it.summary for it in events]},
    )
