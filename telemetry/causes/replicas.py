"""Causes at replicas: restarted or added with an empty cache, out of service, without prefix caching, or silent."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from telemetry.causes.evidence import (
    BEFORE_S,
    MIN_TOKEN_SHARE,
    REVISION_EVENTS,
    CauseKind,
    Evidence,
    Finding,
    Period,
    Prefix,
    PrefixKey,
    RelatedEvent,
    Sums,
    names_text,
    percent,
    sum_by,
    total,
)

CERTAINTY = 0.95
LOOK_BACK_S = 2 * BEFORE_S  # for slow effects: a replica is down before it returns, and gets traffic slowly at first
NO_EVENT = 0.7  # certainty for a lost replica without an event
MAX_EARLIER_SHARE = 0.25  # of its share now, at most, that an added replica had before
MAX_REMAINING_SHARE = 0.25  # of its share before, at most, that a lost replica has now
MAX_SHARE_OF_OUT = 0.5  # the same with an event, which may come late in the first scrape of the drop
MAX_CONTROL_SHARE = 0.1  # of its tokens that a prefix of the control group may have had at replicas that were away
MIN_TAKEN_OVER = 0.2  # of the tokens before: with less, other replicas have room for what they take over
MIN_CONTROL_TOKENS = 0.1  # of all tokens that the control group must have
MIN_COVERED = 0.25  # of the engines' tokens that routers must have reported
REVISED_S = 600.0  # before the drop, a revision may be why all prefixes hit less
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
    was_away = bool(_events_at(evidence, names, "replica_down", "replica_unreachable"))
    of_prompts = _lost_by_prompts_of(evidence, names) if was_away else evidence.lost_by_prefixes_of(names) or 0.0
    tokens = max(evidence.lost_at(names), of_prompts)
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
        {
            "replicas": names,
            "hit_rates": rates,
            "regained_ratio": _regained_ratio(evidence),
            "events": [event.summary for event in events],
        },
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
    return Finding(
        CauseKind.REPLICA_LOST,
        _lost_by_prompts_of(evidence, names),
        CERTAINTY * max(evidence.timing_match(event) for event in events) if events else NO_EVENT,
        f"{names_text(names)} no longer get{'s' if len(names) == 1 else ''} requests and had {percent(share)} of them: "
        "their prompts go to replicas that do not have them cached.",
        "Bring the replica back or replace it. If it was removed on purpose, the hit rate recovers as the other caches "
        "fill; if it does not, they are too small for all prompts.",
        {
            "replicas": names,
            "share_ratio": round(share, 3),
            "regained_ratio": _regained_ratio(evidence),
            "events": [event.summary for event in events],
        },
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


def _lost_by_prompts_of(evidence: Evidence, names: list[str]) -> float:
    """Tokens that these replicas' prefixes lost at any replica; if unknown, by the replicas' share of the traffic."""
    tokens = evidence.lost_by_prefixes_of(names)
    if tokens is not None:
        return tokens
    share = sum(evidence.before.shares.get(name, 0.0) for name in names)
    return min(evidence.lost, share * evidence.now.total.prompt * (evidence.before.total.rate or 0.0))


def _regained_ratio(evidence: Evidence) -> float | None:
    """By how much the hit rate would be higher if no replica had restarted or been away."""
    restarted, (lost, _) = restarted_replicas(evidence), lost_replicas(evidence)
    cold = {event.replica for event in evidence.events_of("replica_restarted")}.intersection(restarted)
    is_revised = any(event.at >= evidence.event_limit(REVISED_S) for event in evidence.events_of(*REVISION_EVENTS))
    before, now = evidence.before.prefixes, evidence.now.prefixes
    if sum(prefix.sums.prompt for prefix in now) < MIN_COVERED * evidence.now.engine_total.prompt or not before:
        before, now = (_as_one_prefix(period) for period in (evidence.before, evidence.now))
    return regained_ratio(before, now, {*restarted, *lost}, cold, may_crowd=not is_revised)


def _as_one_prefix(period: Period) -> list[Prefix]:
    """The whole traffic as one prefix that each replica has with its share of the tokens."""
    return [Prefix("", None, name, sums) for name, sums in period.by_replica.items()]


def regained_ratio(
    before: Sequence[Prefix],
    now: Sequence[Prefix],
    away: Collection[str],
    cold: Collection[str] = (),
    *,
    may_crowd: bool = False,
) -> float | None:
    """Share of the current tokens that would be cached if no replica had been away, 0 to 1; None if unknown.

    A prefix was at a replica that was away with the share of its tokens that it had there before. That share of what it
    usually hits is the most that is attributed, and no more than the prefix lost; at ``cold`` replicas, all of it.
    Prefixes without earlier requests attribute nothing. Prefixes that had almost nothing at those replicas are the
    control group: where they hit less than usual too, something else is wrong, and the loss shrinks as their hit rate
    did, unless the others took over so much that they may have evicted prefixes for it (``may_crowd``).
    """
    tokens = total(prefix.sums for prefix in now).prompt
    usual = sum_by(before, _key)
    if not tokens or not usual:
        return None
    moved = sum_by((prefix for prefix in before if prefix.replica in away), _key)
    shares = {key: moved.get(key, Sums()).prompt / sums.prompt for key, sums in usual.items() if sums.prompt}
    warm = sum_by((prefix for prefix in now if prefix.replica not in cold), _key)
    control = {key: sums for key, sums in warm.items() if shares.get(key, 1.0) < MAX_CONTROL_SHARE}
    all_before = sum(sums.prompt for sums in usual.values())
    is_crowded = may_crowd and sum(sums.prompt for sums in moved.values()) >= MIN_TAKEN_OVER * all_before
    retained = 1.0 if is_crowded else _retained(usual, control, tokens)
    at_cold = sum_by((prefix for prefix in now if prefix.replica in cold), _key)
    lost = 0.0
    for part, is_cold in ((warm, False), (at_cold, True)):
        for key, sums in part.items():
            if key in shares:
                rate = retained * (usual[key].rate or 0.0)
                share = 1.0 if is_cold or is_crowded else shares[key]
                lost += max(min(sums.lost(rate), share * rate * sums.prompt), 0.0)
    return round(lost / tokens, 4)


def _key(prefix: Prefix) -> PrefixKey:
    return prefix.group, prefix.prefix


def _retained(usual: dict[PrefixKey, Sums], control: dict[PrefixKey, Sums], tokens: float) -> float:
    """Hit rate of the control group relative to its usual one, 0 to 1; 1 for too little traffic."""
    current = total(control.values())
    expected = sum(sums.prompt * (usual[key].rate or 0.0) for key, sums in control.items())
    return min(current.cached / expected, 1.0) if expected and current.prompt >= MIN_CONTROL_TOKENS * tokens else 1.0
