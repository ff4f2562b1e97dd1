"""Causes at replicas: restarted or added with an empty cache, out of service, without prefix caching, or silent."""

from __future__ import annotations

from telemetry.causes.evidence import (
    BEFORE_S,
    MIN_TOKEN_SHARE,
    CauseKind,
    Evidence,
    Finding,
    RelatedEvent,
    Sums,
    names_text,
    percent,
)

CERTAINTY = 0.95
LOOK_BACK_S = 2 * BEFORE_S  # for slow effects: a replica is down before it returns, and gets traffic slowly at first
NO_EVENT = 0.7  # certainty for a lost replica without an event
MAX_EARLIER_SHARE = 0.25  # of its share now, at most, that an added replica had before
MAX_REMAINING_SHARE = 0.25  # of its share before, at most, that a lost replica has now
MAX_SHARE_OF_OUT = 0.5  # the same with an event, which may come late in the first scrape of the drop
ADDED = frozenset(
    {"replica_added", "replica_adopted", "replica_readmitted", "replica_state_changed", "replica_up", "replicas_found"}
)
OUT = frozenset({"replica_down", "replica_removed", "replica_ejected", "replica_unreachable", "replica_state_changed"})


def restarted_replicas(evidence: Evidence) -> list[str]:
    """Replicas that restarted, or were down and returned, at about the time of the drop."""
    since, down_since = evidence.event_limit(BEFORE_S), evidence.event_limit(LOOK_BACK_S)
    restarts = {event.replica for event in evidence.events_of("replica_restarted") if event.at >= since}
    downs = evidence.events_of("replica_down", "replica_unreachable")
    down_at = {event.replica: event.at for event in downs if event.at >= down_since}
    ups = [event for event in evidence.events_of("replica_up", "replica_reachable") if event.at >= since]
    returned = {event.replica for event in ups if event.replica in down_at and event.at >= down_at[event.replica]}
    return sorted((restarts | returned) - {"", *replicas_without_cache(evidence)})


def replicas_without_cache(evidence: Evidence) -> list[str]:
    """Replicas that run without prefix caching now and had hits before."""
    before = evidence.before.by_replica
    engines = [engine.replica for engine in evidence.now.engines if engine.lacks_prefix_cache]
    return sorted(name for name in engines if name in before and before[name].cached)


def check_caching_off(evidence: Evidence) -> Finding | None:
    """Measured by the tokens that the replicas lost, or that their prefixes lost."""
    names = replicas_without_cache(evidence)
    if not names:
        return None
    return Finding(
        CauseKind.CACHING_OFF,
        max(evidence.lost_at(names), evidence.lost_by_prefixes_of(names) or 0.0),
        CERTAINTY,
        f"{names_text(names)} run{'s' if len(names) == 1 else ''} without prefix caching: the engine was started with "
        "it switched off, and recomputes every prompt.",
        "Start vLLM there with --enable-prefix-caching, or without --no-enable-prefix-caching. vLLM switches it off by "
        "itself for some models; its log says so.",
        {"replicas": names},
    )


def check_restart(evidence: Evidence) -> Finding | None:
    """Measured by the tokens that the replica lost, or that its prefixes lost while it was down."""
    names = restarted_replicas(evidence)
    if not names:
        return None
    tokens = max(evidence.lost_at(names), evidence.lost_by_prefixes_of(names) or 0.0)
    events = _events_at(evidence, names, "replica_restarted", "replica_down", "replica_up")
    match = max((evidence.timing_match(event) for event in events), default=0.6)
    rates = {name: evidence.now.by_replica[name].rate for name in names if name in evidence.now.by_replica}
    known = {name: rate for name, rate in rates.items() if rate is not None}
    lowest = min(known, key=lambda name: known[name], default=names[0])
    of_which = f" at {lowest}" if len(names) > 1 else ""
    return Finding(
        CauseKind.REPLICA_RESTARTED,
        tokens,
        CERTAINTY * match,
        f"{names_text(names)} {_what_happened(evidence, names)}: hit rate{of_which} {percent(known.get(lowest))} "
        f"instead of {percent(evidence.baseline_rate(lowest))}.",
        "No action if the hit rate recovers: the cache fills as prompts repeat. To fill it before traffic arrives, "
        "enable the pool's warm_up. If the replica restarts again, read the engine's log.",
        {"replicas": names, "hit_rates": rates, "events": [event.summary for event in events]},
    )


def _what_happened(evidence: Evidence, names: list[str]) -> str:
    """A replica that hung or was cut off returns with its cache, but other replicas computed its prompts meanwhile."""
    since = evidence.event_limit(BEFORE_S)
    restarted = {event.replica for event in evidence.events_of("replica_restarted") if event.at >= since}
    if restarted.issuperset(names):
        return "restarted with an empty cache"
    was = "was" if len(names) == 1 else "were"
    return f"restarted or {was} unavailable for a while" if restarted & set(names) else f"{was} unavailable for a while"


def _events_at(evidence: Evidence, replicas: list[str], *kinds: str) -> list[RelatedEvent]:
    return [event for event in evidence.events_of(*kinds) if event.replica in replicas]


def added_replicas(evidence: Evidence) -> tuple[list[str], list[RelatedEvent]]:
    """Replicas that have traffic and had almost none before, and the events of their addition."""
    before, now = evidence.before.shares, evidence.now.shares
    new = [
        name
        for name, share in now.items()
        if name and share > MIN_TOKEN_SHARE and before.get(name, 0.0) < MAX_EARLIER_SHARE * share
    ]
    since = evidence.event_limit(LOOK_BACK_S)
    events = [event for event in _events_at(evidence, new, *ADDED) if event.at >= since]
    names = sorted({event.replica for event in events} - set(restarted_replicas(evidence)))
    return names, [event for event in events if event.replica in names]


def check_addition(evidence: Evidence) -> Finding | None:
    """Measured by the tokens that the added replicas lost relative to the baseline rate of all."""
    names, events = added_replicas(evidence)
    if not names:
        return None
    baseline = evidence.before.total.rate
    sums = [evidence.now.by_replica[name] for name in names]
    share = sum(part.prompt for part in sums) / evidence.now.total.prompt
    rate = percent(sum(part.cached for part in sums) / sum(part.prompt for part in sums))
    return Finding(
        CauseKind.REPLICA_ADDED,
        sum(max(part.lost(baseline), 0.0) for part in sums),
        CERTAINTY * max(evidence.timing_match(event) for event in events),
        f"{names_text(names)} joined with an empty cache and got {percent(share)} of the tokens: hit rate {rate} "
        f"instead of {percent(baseline)}.",
        "No action if the hit rate recovers: the caches fill as prompts repeat. Before adding the next replica, enable "
        "the pool's warm_up, which prefills the prefixes that a replica will get.",
        {"replicas": names, "share_ratio": round(share, 3), "events": [event.summary for event in events]},
    )


def lost_replicas(evidence: Evidence) -> tuple[list[str], list[RelatedEvent]]:
    """Replicas that had traffic and have almost none now, and the events that explain it."""
    before, now = evidence.before.shares, evidence.now.shares
    had_traffic = [name for name, share in before.items() if name and share > MIN_TOKEN_SHARE]
    since = evidence.event_limit(LOOK_BACK_S)
    events = [event for event in _events_at(evidence, had_traffic, *OUT) if event.at >= since]
    out = {event.replica for event in events}
    remaining = {name: now.get(name, 0.0) / before[name] for name in had_traffic}
    lost = {name for name, share in remaining.items() if share < MAX_REMAINING_SHARE}
    candidates = {name for name in out if remaining[name] < MAX_SHARE_OF_OUT} or lost
    names = sorted(candidates - set(restarted_replicas(evidence)))
    return names, [event for event in events if event.replica in names]


def check_loss(evidence: Evidence) -> Finding | None:
    """Measured by the tokens that these replicas' prefixes lost, else by the replicas' share of the traffic."""
    names, events = lost_replicas(evidence)
    if not names:
        return None
    share = sum(evidence.before.shares[name] for name in names)
    tokens = evidence.lost_by_prefixes_of(names)
    if tokens is None:
        tokens = min(evidence.lost, share * evidence.now.total.prompt * (evidence.before.total.rate or 0.0))
    return Finding(
        CauseKind.REPLICA_LOST,
        tokens,
        CERTAINTY * max(evidence.timing_match(event) for event in events) if events else NO_EVENT,
        f"{names_text(names)} no longer get{'s' if len(names) == 1 else ''} requests and had {percent(share)} of them: "
        "their prompts go to replicas that do not have them cached.",
        "Bring the replica back or replace it. If it was removed on purpose, the hit rate recovers as the other caches "
        "fill; if it does not, they are too small for all prompts.",
        {"replicas": names, "share_ratio": round(share, 3), "events": [event.summary for event in events]},
    )


def check_silent_engine(evidence: Evidence) -> Finding | None:
    """Measured by the earlier rate of the other replicas: that much of the drop is not real."""
    before, now = evidence.before, evidence.now
    reported = {engine.replica for engine in before.engines if engine.queries and not engine.silent}
    silent = {engine.replica for engine in now.engines if engine.silent and engine.replica in reported}
    names = sorted(silent - set(replicas_without_cache(evidence)))
    if not names:
        return None
    reporting = [engine for engine in before.engines if engine.replica not in names and engine.queries]
    rest = Sums(
        prompt=sum(engine.queries or 0 for engine in reporting), cached=sum(engine.hits or 0 for engine in reporting)
    )
    baseline = before.engine_total.rate or 0.0
    fall = baseline - (now.engine_total.rate or 0.0)
    share = 1.0
    if rest.rate is not None and now.engine_total.prompt:
        share = (baseline - rest.rate) / fall if fall > 0 else 0.0
    return Finding(
        CauseKind.ENGINE_SILENT,
        min(max(share, 0.0), 1.0) * evidence.lost,
        CERTAINTY,
        f"{names_text(names)} no longer report{'s' if len(names) == 1 else ''} cache hits. The shown hit rate is that "
        f"of the other replicas, which was {percent(rest.rate)} before, too.",
        "Check whether the engine was updated or started with other options (prefix caching, statistics): it may hit "
        "as often as before without counting it.",
        {"replicas": names, "others_baseline_ratio": rest.rate},
    )
