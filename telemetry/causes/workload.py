"""Prompts of one purpose begin otherwise than before: nothing that is cached fits any more.

Theory of operation. Where openings were described, those of now are held against those of before: heads that nobody
sent before, more than heads used to be new, are another prompt, and the comparison with the head most like it says
where it differs and what is there. Elsewhere only keys of openings are known: then old keys that vanish while new ones
take over their traffic are another prompt, and new ones beside the old are another workload.

Other requests than before: less of what they bring has been there before, however large the caches.

What is used in common no longer fits into the caches: it is evicted before it comes again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from telemetry.causes.cause import CauseKind, Finding, percent
from telemetry.causes.evidence import Evidence, Side, Sums
from telemetry.causes.policies import away_from_home, rolled, spilled_tokens
from telemetry.causes.replicas import joined, lost, restarted
from telemetry.lint import Difference, PromptStructure, compare, describe, differences

DESCRIBED = 0.97  # certainty where openings were described
BY_KEYS = 0.8
NEW_PREFIX_GROWTH = 0.2  # of a group's openings that are new: so many more than usual
FEW = 4  # openings on a side that say nothing
COMPARED = 40  # openings of now, and of before, that are compared


@dataclass(frozen=True, slots=True)
class Change:
    """Another prompt of one task group."""

    group: str
    tokens: float
    new: float  # part of the group's openings, or tokens, that is new
    is_described: bool
    difference: Difference | None = None  # the commonest
    keeps_changing: bool = False  # each request has another one


def changes(evidence: Evidence) -> list[Change]:
    """Those of all task groups, the dearest first."""
    groups = {route.group for route in evidence.now.routes} | {it.group for it in evidence.now.prefixes}
    if evidence.group is not None:
        groups &= {evidence.group}
    found = [change for group in sorted(groups) if (change := _described(evidence, group) or _by_keys(evidence, group))]
    return sorted((it for it in found if it.tokens > 0), key=lambda it: it.tokens, reverse=True)


def judge_prompt_change(evidence: Evidence) -> Finding | None:
    """By the tokens that the openings lost that are new."""
    found = changes(evidence)
    if not found:
        return None
    worst, tokens = found[0], sum(it.tokens for it in found)
    whose = f"of task group {worst.group}" if worst.group else "of requests without a task group"
    where = describe(worst.difference) if worst.difference else "begin with another text"
    every = ", another with each request" if worst.keeps_changing else ""
    return Finding(
        CauseKind.PROMPT_CHANGED,
        tokens,
        sum(it.tokens * (DESCRIBED if it.is_described else BY_KEYS) for it in found) / tokens,
        f"Prompts {whose} {where}{every}: {percent(worst.new)} of them are not as before.",
        "Look at what was deployed at its clients. What changes from request to request belongs behind what stays the "
        "same; the page of prompts shows where, and what it costs.",
        {
            "groups": [it.group for it in found],
            "new_ratio": round(worst.new, 3),
            "keeps_changing": worst.keeps_changing,
            "kind": worst.difference and worst.difference.kind.value,
            "segment": worst.difference and worst.difference.segment,
            "offset_tokens": worst.difference and worst.difference.at_tokens,
            "stable_tokens": worst.difference and worst.difference.stable_tokens,
        },
    )


def _described(evidence: Evidence, group: str) -> Change | None:
    """By described openings; None where there are too few, or no more of them are new than usual."""
    before, now = (_openings(side, group) for side in (evidence.before, evidence.now))
    if len(before) < FEW or len(now) < FEW:
        return None
    heads = {opening.signature for opening in before}
    new = [opening for opening in now if opening.signature not in heads]
    share = len(new) / len(now)
    if share - _usually_new(before) < NEW_PREFIX_GROWTH:
        return None
    keeps = len({opening.signature for opening in new}) > max(2, 0.3 * len(new))
    pairs = differences(new[-COMPARED:]) if keeps else [_against(opening, before) for opening in new[-COMPARED:]]
    return Change(group, _lost(evidence, group), share, True, _commonest(it for it in pairs if it is not None), keeps)


def _openings(side: Side, group: str) -> list[PromptStructure]:
    """In order of time."""
    return [it.opening for it in sorted(side.openings, key=lambda it: it.at) if it.group == group]


def _usually_new(openings: Sequence[PromptStructure]) -> float:
    """The part of the later half's heads that the earlier one has not."""
    half = len(openings) // 2
    known = {opening.signature for opening in openings[:half]}
    return sum(opening.signature not in known for opening in openings[half:]) / (len(openings) - half)


def _against(opening: PromptStructure, before: Sequence[PromptStructure]) -> Difference | None:
    return compare(opening, max(before[-COMPARED:], key=opening.shared))


def _commonest(differences: Iterable[Difference]) -> Difference | None:
    """The first of the kind and segment met most often."""
    found = list(differences)
    if not found:
        return None
    (kind, segment), _ = Counter((it.kind, it.segment) for it in found).most_common(1)[0]
    return min((it for it in found if (it.kind, it.segment) == (kind, segment)), key=lambda it: it.at)


def _by_keys(evidence: Evidence, group: str) -> Change | None:
    """By keys of openings alone, where no opening is described as unchanged."""
    if len(_openings(evidence.before, group)) >= FEW and len(_openings(evidence.now, group)) >= FEW:
        return None
    turnover = turned_over(evidence, group)
    if turnover is None or turnover.replaced - turnover.usually_new < NEW_PREFIX_GROWTH:
        return None
    return Change(group, _lost(evidence, group), turnover.replaced, False)


def _lost(evidence: Evidence, group: str) -> float:
    """Tokens that a group lost: with its new openings where these are known, else in all."""
    usual = group_sums(evidence.before, group).rate
    whole = group_sums(evidence.now, group).lost(usual)
    turnover = turned_over(evidence, group)
    if turnover is None or not turnover.new.prompt:
        return max(whole, 0.0)
    return max(min(turnover.new.lost(usual) * evidence.now.sampled, whole), 0.0)


@dataclass(frozen=True, slots=True)
class Turnover:
    """How the keys of a group's openings changed."""

    new: Sums  # of openings not seen before; of the sample
    replaced: float  # part of the group's tokens that is new, and for which old openings vanished
    beside: float  # that is new, beside old openings that go on
    usually_new: float


def turned_over(evidence: Evidence, group: str) -> Turnover | None:
    """None where nothing is known of openings."""
    before = {key: sums for key, sums in evidence.before.by_prefix.items() if key[0] == group}
    now = {key: sums for key, sums in evidence.now.by_prefix.items() if key[0] == group}
    tokens_now, tokens_before = (sum(it.prompt for it in side.values()) for side in (now, before))
    if not tokens_now or not tokens_before:
        return None
    new = sum((sums for key, sums in now.items() if key not in before), Sums())
    pace_now, pace_before = evidence.now.seconds, evidence.before.seconds
    vanished = sum(max(sums.prompt / pace_before - now.get(key, Sums()).prompt / pace_now, 0.0)
                   for key, sums in before.items())  # fmt: skip
    fresh = new.prompt / pace_now
    replaced = min(vanished, fresh) / (tokens_now / pace_now)
    return Turnover(new, replaced, new.prompt / tokens_now - replaced, evidence.before.usually_new(group))


def group_sums(side: Side, group: str) -> Sums:
    """A task group's part, by the routers."""
    return sum((route.sums for route in side.routes if route.group == group), Sums())


CERTAINTY = 0.9
WORKLOAD_WITHOUT_LADDER = 0.65
UNSEEN_GROWTH = 0.02  # of the tokens


def judge_workload_change(evidence: Evidence) -> Finding | None:
    """By the fall of the ladder's first rung, W; without it by openings that are new or have another part now."""
    now, before = evidence.now.rung("reachable"), evidence.before.rung("reachable")
    if now is not None and before is not None:
        tokens, certainty = (before - now) * evidence.now.total.prompt, CERTAINTY
        said = f"At best {percent(now)} of the tokens have been seen before, {percent(before)} usually"
    else:
        tokens, certainty = _by_mix(evidence) or 0.0, WORKLOAD_WITHOUT_LADDER
        said = "Openings that hit less, or were never seen, have a larger part of the traffic"
    tokens -= sum(it.tokens for it in changes(evidence))
    if tokens < UNSEEN_GROWTH * evidence.now.total.prompt:
        return None
    paces = [side.total.requests / side.seconds for side in (evidence.before, evidence.now)]
    return Finding(
        CauseKind.WORKLOAD_CHANGED,
        tokens,
        certainty,
        f"{said}: it is other traffic, with the same prompts as before.",
        "Look which task group grew. If the new traffic can share nothing, give it a task group of its own, with a "
        "policy that asks for no affinity, so that it does not evict what others share.",
        {
            "reachable_ratio": now,
            "usual_reachable_ratio": before,
            "requests_per_s": round(paces[1], 3),
            "usual_requests_per_s": round(paces[0], 3),
            "groups": _grown(evidence),
        },
    )


def _by_mix(evidence: Evidence) -> float | None:
    """Tokens lost to what is asked, each opening hitting as usual and new ones as they do; None unless known."""
    usual, known = evidence.before.total.rate, evidence.before.by_prefix
    if usual is None or not known or not evidence.now.prefixes:
        return None
    lost = sum(
        sums.prompt * (usual - (known[key].rate or 0.0)) if key in known else sums.lost(usual)
        for key, sums in evidence.now.by_prefix.items()
    )
    return lost * evidence.now.sampled


def _grown(evidence: Evidence) -> list[str]:
    """The task groups whose part of the tokens grew most, as people call them."""
    groups = {route.group for route in evidence.now.routes}
    now, before = evidence.now.total.prompt or 1.0, evidence.before.total.prompt or 1.0
    grown = {
        group: group_sums(evidence.now, group).prompt / now - group_sums(evidence.before, group).prompt / before
        for group in groups
    }
    return [group for group in sorted(grown, key=lambda it: grown[it], reverse=True) if grown[group] > UNSEEN_GROWTH][
        :3
    ]


WITHOUT_LADDER, WITH_PRESSURE = 0.45, 0.65
BY_ANOTHER = 0.4  # of that, where a replica was lost: then there is less cache, not more to keep
EVICTED_GROWTH = 0.02  # of the tokens


def judge_capacity(evidence: Evidence) -> Finding | None:
    """By the rungs W - C of the ladder; without it by known openings that hit less, though nothing moved them."""
    grown = evidence.grown("reachable", "capacity")
    if grown is not None:
        tokens, certainty = grown, CERTAINTY
    else:
        tokens = (_lost_at_home(evidence) or 0.0) + _lost_elsewhere(evidence)
        certainty = WITH_PRESSURE if _pressed(evidence) else WITHOUT_LADDER
    if tokens < EVICTED_GROWTH * evidence.now.total.prompt:
        return None
    if lost(evidence)[0]:
        certainty *= BY_ANOTHER
    usage, before = _kv_usage(evidence.now), _kv_usage(evidence.before)
    gap, usual = evidence.now.gap("reachable", "capacity"), evidence.before.gap("reachable", "capacity")
    said = (
        f"The fleet's caches hold too little of what comes again: {percent(gap)} of the tokens are lost to it, "
        f"{percent(usual)} before."
        if gap is not None
        else "Known prompts hit less, and nothing sent them elsewhere: caches drop them before they come again."
    )
    return Finding(
        CauseKind.CAPACITY,
        tokens,
        certainty,
        said,
        "Give the engines more KV cache (memory, a quantised cache, offloading to the host), add replicas, or send "
        "fewer task groups to each replica. The capacity curve of the pool shows what each would bring.",
        {"gap_ratio": gap, "usual_gap_ratio": usual, "kv_usage_ratio": usage, "usual_kv_usage_ratio": before},
    )


def _kv_usage(side: Side) -> float | None:
    known = [it.kv_usage_ratio for it in side.engines if it.kv_usage_ratio is not None]
    return sum(known) / len(known) if known else None


def _pressed(evidence: Evidence) -> bool:
    now, before = (sum(it.preemptions or 0.0 for it in side.engines) / side.seconds for side in
                   (evidence.now, evidence.before))  # fmt: skip
    usage, usual = _kv_usage(evidence.now), _kv_usage(evidence.before)
    return now > 2 * before or (usage is not None and usual is not None and usage > usual + 0.1)


def _lost_at_home(evidence: Evidence) -> float | None:
    if not evidence.before.prefixes or not evidence.now.prefixes:
        return None
    homes, usual, away = evidence.before.homes, evidence.before.by_prefix, set(restarted(evidence))
    parts = (
        max(it.sums.lost(usual[it.group, it.prefix].rate), 0.0)
        for it in evidence.now.prefixes
        if it.replica == homes.get((it.group, it.prefix)) and it.replica not in away
    )
    return sum(parts) * evidence.now.sampled


def _lost_elsewhere(evidence: Evidence) -> float:
    """Tokens that known openings lost at other replicas though these did not spill: nobody held them any more.

    0 where replicas or a revision may have sent them there.
    """
    moved = lost(evidence)[0] or joined(evidence)[0] or restarted(evidence)
    if moved or any(not it.did_well for it in rolled(evidence)):
        return 0.0
    return max((away_from_home(evidence) or 0.0) - spilled_tokens(evidence), 0.0)
