"""Other requests than before: less of what they bring has been there before, however large the caches."""

from __future__ import annotations

from telemetry.causes import prompt_changed
from telemetry.causes.cause import CauseKind, Finding, percent
from telemetry.causes.evidence import Evidence

CERTAINTY = 0.9
WITHOUT_LADDER = 0.65
GROWN = 0.02  # of the tokens


def judge(evidence: Evidence) -> Finding | None:
    """By the fall of the ladder's first rung, W; without it by openings that are new or have another part now."""
    now, before = evidence.now.rung("reachable"), evidence.before.rung("reachable")
    if now is not None and before is not None:
        tokens, certainty = (before - now) * evidence.now.total.prompt, CERTAINTY
        said = f"At best {percent(now)} of the tokens have been seen before, {percent(before)} usually"
    else:
        tokens, certainty = _by_mix(evidence) or 0.0, WITHOUT_LADDER
        said = "Openings that hit less, or were never seen, have a larger part of the traffic"
    tokens -= sum(it.tokens for it in prompt_changed.changes(evidence))
    if tokens < GROWN * evidence.now.total.prompt:
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
        group: prompt_changed.group_sums(evidence.now, group).prompt / now
        - prompt_changed.group_sums(evidence.before, group).prompt / before
        for group in groups
    }
    return [group for group in sorted(grown, key=lambda it: grown[it], reverse=True) if grown[group] > GROWN][:3]
