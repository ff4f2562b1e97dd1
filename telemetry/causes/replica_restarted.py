"""A replica restarted: its cache is empty, and fills as its prompts come again."""

from __future__ import annotations

from telemetry.causes.cause import CauseKind, Finding, listed, percent
from telemetry.causes.evidence import AHEAD_S, Evidence

CERTAINTY = 0.95
LOOK_BACK_S = 2 * AHEAD_S  # for when it went; an empty cache is seen at once, so it came back later than that


def restarted(evidence: Evidence) -> list[str]:
    """Replicas that began anew about when the rate fell, or were down and are back."""
    since, went_since = evidence.changed_since(AHEAD_S), evidence.changed_since(LOOK_BACK_S)
    began = {it.replica for it in evidence.what("replica_restarted") if it.at >= since}
    down = {it.replica: it.at for it in evidence.what("replica_down", "replica_unreachable") if it.at >= went_since}
    up = [it for it in evidence.what("replica_up", "replica_reachable") if it.at >= since]
    back = {it.replica for it in up if it.replica in down and it.at >= down[it.replica]}
    return sorted((began | back) - {""})


def judge(evidence: Evidence) -> Finding | None:
    """By the tokens that the replica lost, or the openings that were at home there while it was away."""
    names = restarted(evidence)
    if not names:
        return None
    tokens = max(evidence.lost_at(names), evidence.lost_from(names) or 0.0)
    events = [it for it in evidence.what("replica_restarted", "replica_down", "replica_up") if it.replica in names]
    fits = max(evidence.fits(it) for it in events) if events else 0.6
    rates = {name: evidence.now.by_replica[name].rate for name in names if name in evidence.now.by_replica}
    now = percent(next(iter(rates.values()), None))
    return Finding(
        CauseKind.REPLICA_RESTARTED,
        tokens,
        CERTAINTY * fits,
        f"{listed(names)} restarted with an empty cache and hit{'s' if len(names) == 1 else ''} {now} "
        f"instead of {percent(evidence.usual(names[0]))}.",
        "Nothing, if it recovers: its cache fills as prompts come again. To have it filled before traffic comes, "
        "switch on the pool's warm_up; if it restarts again, look into the engine's log.",
        {"replicas": names, "hit_rates": rates, "events": [it.summary for it in events]},
    )
