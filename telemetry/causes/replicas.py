"""A replica restarted: its cache is empty, and fills as its prompts come again.

A replica joined: it is cold, and takes over openings that were warm elsewhere.

A replica is gone or out of use: what was at home there meets cold caches, and the others have less room each.

Engines no longer tell what their caches do: the rate is that of the others.
"""

from __future__ import annotations

from telemetry.causes.cause import CauseKind, Finding, listed, percent
from telemetry.causes.evidence import AHEAD_S, LITTLE, Evidence, RelatedEvent, Sums

CERTAINTY = 0.95
RESTART_LOOK_BACK_S = 2 * AHEAD_S  # for when it went; an empty cache is seen at once, so it came back later than that


def restarted(evidence: Evidence) -> list[str]:
    """Replicas that began anew about when the rate fell, or were down and are back."""
    since, went_since = evidence.changed_since(AHEAD_S), evidence.changed_since(RESTART_LOOK_BACK_S)
    began = {it.replica for it in evidence.what("replica_restarted") if it.at >= since}
    down = {it.replica: it.at for it in evidence.what("replica_down", "replica_unreachable") if it.at >= went_since}
    up = [it for it in evidence.what("replica_up", "replica_reachable") if it.at >= since]
    back = {it.replica for it in up if it.replica in down and it.at >= down[it.replica]}
    return sorted((began | back) - {""})


def judge_restart(evidence: Evidence) -> Finding | None:
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


HAD = 0.25  # of its share, at most, of a replica that is new
ADDITION_LOOK_BACK_S = 2 * AHEAD_S  # it takes traffic slowly at first
JOINED = frozenset(
    {"replica_added", "replica_adopted", "replica_readmitted", "replica_state_changed", "replica_up", "replicas_found"}
)


def joined(evidence: Evidence) -> tuple[list[str], list[RelatedEvent]]:
    """Replicas that have traffic and had next to none, and the events that say why."""
    before, now = evidence.before.paces, evidence.now.paces
    new = {name for name, share in now.items() if name and share > LITTLE and before.get(name, 0.0) < HAD * share}
    since = evidence.changed_since(ADDITION_LOOK_BACK_S)
    events = [it for it in evidence.what(*JOINED) if it.replica in new and it.at >= since]
    names = sorted({it.replica for it in events} - set(restarted(evidence)))
    return names, [it for it in events if it.replica in names]


def judge_addition(evidence: Evidence) -> Finding | None:
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


UNSEEN = 0.7  # the same where no event says so
LEFT = 0.25  # of its share, at most, of a replica that is gone
LOSS_LOOK_BACK_S = 2 * AHEAD_S
OUT = frozenset({"replica_down", "replica_removed", "replica_ejected", "replica_unreachable", "replica_state_changed"})
BACK = frozenset({"replica_up", "replica_readmitted", "replica_reachable"})


def lost(evidence: Evidence) -> tuple[list[str], list[RelatedEvent]]:
    """Replicas that had their part of the traffic and have next to none, and the events that tell of it."""
    before, now = evidence.before.paces, evidence.now.paces
    had = {name for name, share in before.items() if name and share > LITTLE}
    gone = {name for name in had if now.get(name, 0.0) < LEFT * before[name]}
    since = evidence.changed_since(LOSS_LOOK_BACK_S)
    events = [it for it in evidence.what(*OUT) if it.at >= since and it.replica in had]
    last = {it.replica: it.kind for it in evidence.what(*OUT, *BACK) if it.at >= since}
    out = {it.replica for it in events if last[it.replica] in OUT}
    names = sorted(((gone & {it.replica for it in events}) | (out & gone) or gone) - set(restarted(evidence)))
    return names, [it for it in events if it.replica in names]


def judge_loss(evidence: Evidence) -> Finding | None:
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


def judge_silent_engine(evidence: Evidence) -> Finding | None:
    """By what the others' rate was before: that much of the fall is no fall at all."""
    silent = sorted(it.replica for it in evidence.now.engines if it.silent)
    told_before = {it.replica for it in evidence.before.engines if it.queries and not it.silent}
    names = [name for name in silent if name in told_before]
    if not names:
        return None
    before, now = evidence.before.engine_total, evidence.now.engine_total
    others = [it for it in evidence.before.engines if it.replica not in names and it.queries]
    rest = Sums(prompt=sum(it.queries or 0 for it in others), cached=sum(it.hits or 0 for it in others))
    fallen = (before.rate or 0.0) - (now.rate or 0.0)
    share = (
        1.0
        if rest.rate is None or not now.prompt
        else ((before.rate or 0.0) - rest.rate) / fallen
        if fallen > 0
        else 0.0
    )
    return Finding(
        CauseKind.ENGINE_SILENT,
        min(max(share, 0.0), 1.0) * evidence.lost,
        CERTAINTY,
        f"{listed(names)} answer{'s' if len(names) == 1 else ''} and no longer report{'s' if len(names) == 1 else ''} "
        f"cache hits; what is shown is the rate of the others, which was {percent(rest.rate)} before, too.",
        "Look whether the engine was updated or started with other options (prefix caching, statistics): hits may be "
        "as good as before, and are not counted.",
        {"replicas": names, "others_usual_ratio": rest.rate},
    )
