"""Causes in the requests themselves: other prompts, another workload, or more shared prefixes than the caches hold.

Theory of operation of changed prompts. Where the beginnings of prompts were described, those of now are compared with
those of before. If more of them are new than usual, the prompt changed, and the comparison with the most similar one
shows where it differs. Elsewhere only keys of prefixes are known: if old keys vanish while new ones take over their
traffic, the prompt changed; new ones in addition to the old are another workload.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from telemetry.causes.evidence import CauseKind, Evidence, Finding, Period, Sums, percent, total
from telemetry.causes.policies import (
    has_new_revision,
    lost_at_other_replicas,
    lost_by_overflow,
    wrongly_predicted,
)
from telemetry.causes.replicas import added_replicas, lost_replicas, restarted_replicas
from telemetry.lint.differences import Difference, Kind, compare
from telemetry.lint.findings import describe
from telemetry.lint.structure import PromptStructure

DESCRIBED = 0.97  # certainty if prompts were described
BY_KEYS = 0.8
NEW_PREFIX_GROWTH = 0.2  # of a group's prefixes: growth of the share that is new
MIN_PROMPTS = 4  # described prompts that a period needs for a comparison
MIN_NEVER_REPEATED = 0.8  # of the later half of new prompts: those that the earlier half does not have
COMPARED = 40  # prompts of each period that are compared
MIN_KNOWN = 0.25  # differences of a known kind, relative to those of none


@dataclass(frozen=True, slots=True)
class Change:
    """A changed prompt of one task group."""

    group: str
    tokens: float
    new: float  # share of the group's prompts, or tokens, that is new
    is_described: bool
    difference: Difference | None = None  # the most frequent one
    keeps_changing: bool = False  # each request has another beginning


def prompt_changes(evidence: Evidence) -> list[Change]:
    """Changed prompts of all task groups, the most expensive first."""
    groups = {route.group for route in evidence.now.routes} | {prefix.group for prefix in evidence.now.prefixes}
    if evidence.group is not None:
        groups &= {evidence.group}
    changes = [_described_change(evidence, group) or _key_change(evidence, group) for group in sorted(groups)]
    limited = [_limited(evidence, change) for change in changes if change is not None]
    costly = [change for change in limited if change.tokens > 0]
    return sorted(costly, key=lambda change: change.tokens, reverse=True)


def _limited(evidence: Evidence, change: Change) -> Change:
    """The change with the tokens that no cache could have had, if its new prompts repeat and this is known.

    What repeats and is not cached was lost to something else, such as caches that are too small for more prompts.
    """
    now, before = evidence.now.term_ratio("reachable"), evidence.before.term_ratio("reachable")
    if change.keeps_changing or now is None or before is None:
        return change
    return replace(change, tokens=min(change.tokens, max(before - now, 0.0) * evidence.now.total.prompt))


def check_prompt_change(evidence: Evidence) -> Finding | None:
    """Measured by the tokens that new prefixes lost."""
    changes = prompt_changes(evidence)
    if not changes:
        return None
    worst, tokens = changes[0], sum(change.tokens for change in changes)
    group = f"of task group {worst.group}" if worst.group else "of requests without a task group"
    where = describe(worst.difference) if worst.difference else "begin with another text"
    every = ", different in each request" if worst.keeps_changing else ""
    return Finding(
        CauseKind.PROMPT_CHANGED,
        tokens,
        sum(change.tokens * (DESCRIBED if change.is_described else BY_KEYS) for change in changes) / tokens,
        f"Prompts {group} {where}{every}: {percent(worst.new)} of them are not as before.",
        "Check what was deployed at its clients. Move text that varies between requests behind the text that does not; "
        "the page of prompts shows where it is and what it costs.",
        {
            "groups": [change.group for change in changes],
            "new_ratio": round(worst.new, 3),
            "keeps_changing": worst.keeps_changing,
            "kind": worst.difference and worst.difference.kind.value,
            "segment": worst.difference and worst.difference.segment,
            "offset_tokens": worst.difference and worst.difference.at_tokens,
            "stable_tokens": worst.difference and worst.difference.stable_tokens,
        },
    )


def _described_change(evidence: Evidence, group: str) -> Change | None:
    """The change shown by described prompts; None for too few, or if no more of them are new than usual."""
    before, now = (_structures(period, group) for period in (evidence.before, evidence.now))
    if len(before) < MIN_PROMPTS or len(now) < MIN_PROMPTS:
        return None
    signatures = {structure.signature for structure in before}
    new = [structure for structure in now if structure.signature not in signatures]
    share = len(new) / len(now)
    if share - _baseline_new_share(before) < NEW_PREFIX_GROWTH:
        return None
    # Not only different ones, but hardly one that occurred before: a few new prompts may be different ones that repeat.
    is_varied = len({structure.signature for structure in new}) > max(2, 0.3 * len(new))
    keeps_changing = is_varied and _baseline_new_share(new) > MIN_NEVER_REPEATED
    common = _most_common(_differences(new[-COMPARED:], before[-COMPARED:], among_new=keeps_changing))
    return Change(group, _lost(evidence, group), share, True, common, keeps_changing)


def _differences(
    new: Sequence[PromptStructure], before: Sequence[PromptStructure], *, among_new: bool
) -> Iterator[Difference]:
    """The difference of each new prompt from the most similar one: of before, or of earlier new ones.

    Of equally similar ones the latest new one counts, which shows what changes in each request. Few new prompts may all
    belong to different agents, and then only those of before have the same tools.
    """
    for index, prompt in enumerate(new):
        others = [*reversed(new[:index] if among_new else ()), *reversed(before)]
        if (difference := compare(prompt, max(others, key=prompt.shared_bytes))) is not None:
            yield difference


def _structures(period: Period, group: str) -> list[PromptStructure]:
    """Described prompts in order of time."""
    return [
        prompt.structure for prompt in sorted(period.prompts, key=lambda prompt: prompt.at) if prompt.group == group
    ]


def _baseline_new_share(structures: Sequence[PromptStructure]) -> float:
    """Share of the later half that the earlier half does not have."""
    half = len(structures) // 2
    earlier = {structure.signature for structure in structures[:half]}
    return sum(structure.signature not in earlier for structure in structures[half:]) / (len(structures) - half)


def _most_common(differences: Iterable[Difference]) -> Difference | None:
    """The earliest in the prompt of the most common kind and segment; a known kind if a part of that segment's is.

    Changing text without a known kind is often the same change, compared with a prompt from before it.
    """
    by_kind = [((difference.kind, difference.segment), difference) for difference in differences]
    if not by_kind:
        return None
    counts = Counter(key for key, _ in by_kind)
    (kind, segment), count = counts.most_common(1)[0]
    if kind is Kind.OTHER:
        known = [key for key in counts if key[1] == segment and key[0] is not kind and counts[key] >= MIN_KNOWN * count]
        kind = max(known, key=counts.__getitem__, default=(kind, segment))[0]
    return min((found for key, found in by_kind if key == (kind, segment)), key=lambda difference: difference.at)


def _key_change(evidence: Evidence, group: str) -> Change | None:
    """The change shown by keys of prefixes; None if there are enough described prompts."""
    if min(len(_structures(period, group)) for period in (evidence.before, evidence.now)) >= MIN_PROMPTS:
        return None
    turnover = prefix_turnover(evidence, group)
    if turnover is None or turnover.replaced - evidence.before.new_prefix_ratio(group) < NEW_PREFIX_GROWTH:
        return None
    return Change(group, _lost(evidence, group), turnover.replaced, False)


def _lost(evidence: Evidence, group: str) -> float:
    """Tokens that a group lost: with its new prefixes if they are known, else in all."""
    baseline = group_sums(evidence.before, group).rate
    whole = group_sums(evidence.now, group).lost(baseline)
    turnover = prefix_turnover(evidence, group)
    if turnover is None or not turnover.new.prompt:
        return max(whole, 0.0)
    return max(min(turnover.new.lost(baseline) * evidence.now.sample_factor, whole), 0.0)


@dataclass(frozen=True, slots=True)
class Turnover:
    """How the prefixes of a group changed."""

    new: Sums  # of prefixes without requests before; of the sample
    replaced: float  # share of the group's tokens with new prefixes that replaced old ones


def prefix_turnover(evidence: Evidence, group: str) -> Turnover | None:
    """New prefixes of a group, and the share of its tokens that replaced old ones; None if none are known."""
    before = {key: sums for key, sums in evidence.before.by_prefix.items() if key[0] == group}
    now = {key: sums for key, sums in evidence.now.by_prefix.items() if key[0] == group}
    tokens_now, tokens_before = (sum(sums.prompt for sums in period.values()) for period in (now, before))
    if not tokens_now or not tokens_before:
        return None
    new = total(sums for key, sums in now.items() if key not in before)
    now_s, before_s = evidence.now.seconds, evidence.before.seconds
    vanished = sum(
        max(sums.prompt / before_s - now.get(key, Sums()).prompt / now_s, 0.0) for key, sums in before.items()
    )
    return Turnover(new, min(vanished, new.prompt / now_s) / (tokens_now / now_s))


def group_sums(period: Period, group: str) -> Sums:
    """A task group's sums, by the routers."""
    return total(route.sums for route in period.routes if route.group == group)


CERTAINTY = 0.9
WORKLOAD_WITHOUT_BREAKDOWN = 0.65
NEW_GROWTH = 0.02  # of the tokens: growth that may matter


def check_workload_change(evidence: Evidence) -> Finding | None:
    """Measured by the fall of the reachable hit rate, else by prefixes that are new or have another share now."""
    now, before = evidence.now.term_ratio("reachable"), evidence.before.term_ratio("reachable")
    if now is not None and before is not None:
        tokens, certainty = (before - now) * evidence.now.total.prompt, CERTAINTY
        summary = f"At most {percent(now)} of the tokens repeat earlier ones, {percent(before)} usually"
    else:
        tokens, certainty = _lost_by_mix(evidence) or 0.0, WORKLOAD_WITHOUT_BREAKDOWN
        summary = "Prefixes that are new, or usually hit less, have a larger share of the traffic"
    tokens -= sum(change.tokens for change in prompt_changes(evidence))
    if tokens < NEW_GROWTH * evidence.now.total.prompt:
        return None
    rates = [period.total.requests / period.seconds for period in (evidence.before, evidence.now)]
    return Finding(
        CauseKind.WORKLOAD_CHANGED,
        tokens,
        certainty,
        f"{summary}: the traffic changed, its prompts did not.",
        "Check which task group grew. If the new traffic can share nothing, give it a task group of its own with a "
        "policy without affinity, so that it does not evict what others share.",
        {
            "reachable_ratio": now,
            "baseline_reachable_ratio": before,
            "requests_per_s": round(rates[1], 3),
            "baseline_requests_per_s": round(rates[0], 3),
            "groups": _grown_groups(evidence),
        },
    )


def _lost_by_mix(evidence: Evidence) -> float | None:
    """Tokens lost because the mix of prefixes changed, with each known prefix hitting as usual; None if unknown."""
    baseline, sums_before = evidence.before.total.rate, evidence.before.by_prefix
    if baseline is None or not sums_before or not evidence.now.prefixes:
        return None
    lost = sum(
        sums.prompt * (baseline - (sums_before[key].rate or 0.0)) if key in sums_before else sums.lost(baseline)
        for key, sums in evidence.now.by_prefix.items()
    )
    return lost * evidence.now.sample_factor


def _grown_groups(evidence: Evidence) -> list[str]:
    """Up to three task groups whose share of the tokens grew most."""
    now, before = evidence.now.total.prompt or 1.0, evidence.before.total.prompt or 1.0
    growth = {
        group: group_sums(evidence.now, group).prompt / now - group_sums(evidence.before, group).prompt / before
        for group in {route.group for route in evidence.now.routes}
    }
    return [
        group for group in sorted(growth, key=lambda name: growth[name], reverse=True) if growth[group] > NEW_GROWTH
    ][:3]


WITHOUT_BREAKDOWN, WITH_PRESSURE = 0.45, 0.65
REPLICA_LOST = 0.4  # factor if a replica was lost: then there is less cache, not more to cache
EVICTED_GROWTH = 0.02  # of the tokens: growth that may matter


def check_capacity(evidence: Evidence) -> Finding | None:
    """Measured by the breakdown's loss to capacity, else by known prefixes that hit less without having been moved."""
    grown = evidence.gap_growth("reachable", "capacity")
    if grown is not None:
        tokens, certainty = grown, CERTAINTY
    else:
        # What a replica lost at once is no eviction: routers expected it to be cached.
        tokens = (_lost_at_main_replica(evidence) or 0.0) + _evicted_at_other_replicas(evidence)
        tokens -= sum(wrongly_predicted(evidence).values())
        certainty = WITH_PRESSURE if _has_more_pressure(evidence) else WITHOUT_BREAKDOWN
    if tokens < EVICTED_GROWTH * evidence.now.total.prompt:
        return None
    if lost_replicas(evidence)[0]:
        certainty *= REPLICA_LOST
    usage, before = _kv_usage(evidence.now), _kv_usage(evidence.before)
    gap, baseline = evidence.now.gap("reachable", "capacity"), evidence.before.gap("reachable", "capacity")
    summary = (
        f"The caches are too small for what repeats: {percent(gap)} of the tokens were evicted before they were used "
        f"again, {percent(baseline)} before."
        if gap is not None
        else "Known prefixes hit less though nothing moved them: caches evict them before they are used again."
    )
    return Finding(
        CauseKind.CAPACITY,
        tokens,
        certainty,
        summary,
        "Give the engines more KV cache (memory, a quantised cache, offloading to the host), add replicas, or send "
        "fewer task groups to each replica. The capacity curve of the pool shows the effect of each.",
        {"gap_ratio": gap, "baseline_gap_ratio": baseline, "kv_usage_ratio": usage, "baseline_kv_usage_ratio": before},
    )


def _kv_usage(period: Period) -> float | None:
    usages = [engine.kv_usage_ratio for engine in period.engines if engine.kv_usage_ratio is not None]
    return sum(usages) / len(usages) if usages else None


def _has_more_pressure(evidence: Evidence) -> bool:
    now, before = (
        sum(engine.preemptions or 0.0 for engine in period.engines) / period.seconds
        for period in (evidence.now, evidence.before)
    )
    usage, baseline = _kv_usage(evidence.now), _kv_usage(evidence.before)
    return now > 2 * before or (usage is not None and baseline is not None and usage > baseline + 0.1)


def _lost_at_main_replica(evidence: Evidence) -> float | None:
    if not evidence.before.prefixes or not evidence.now.prefixes:
        return None
    main, baseline, restarted = evidence.before.main_replicas, evidence.before.by_prefix, restarted_replicas(evidence)
    lost = (
        max(prefix.sums.lost(baseline[prefix.group, prefix.prefix].rate), 0.0)
        for prefix in evidence.now.prefixes
        if prefix.replica == main.get((prefix.group, prefix.prefix)) and prefix.replica not in restarted
    )
    return sum(lost) * evidence.now.sample_factor


def _evicted_at_other_replicas(evidence: Evidence) -> float:
    """Tokens that known prefixes lost at other replicas without overflow: no replica had them cached any more.

    0 if replicas or a revision may have moved them.
    """
    moved = lost_replicas(evidence)[0] or added_replicas(evidence)[0] or restarted_replicas(evidence)
    if moved or has_new_revision(evidence):
        return 0.0
    return max((lost_at_other_replicas(evidence) or 0.0) - lost_by_overflow(evidence), 0.0)
