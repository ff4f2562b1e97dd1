"""Engines no longer tell what their caches do: the rate is that of the others."""

from __future__ import annotations

from telemetry.causes.cause import CauseKind, Finding, listed, percent
from telemetry.causes.evidence import Evidence, Sums

CERTAINTY = 0.95


def judge(evidence: Evidence) -> Finding | None:
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
