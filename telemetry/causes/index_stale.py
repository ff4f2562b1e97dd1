"""Routers expect hits that engines do not deliver: they hold less than routers believe."""

from __future__ import annotations

from telemetry.causes.cause import CauseKind, Finding, listed, percent
from telemetry.causes.evidence import Evidence, Sums
from telemetry.causes.replica_restarted import restarted

CERTAINTY = 0.9
GROWN = 0.03  # of the tokens


def judge(evidence: Evidence) -> Finding | None:
    """By predicted and delivered tokens of the same answers, leaving out replicas that restarted."""
    skipped = set(restarted(evidence))
    gaps = {name: _grown(evidence, name) for name in evidence.now.by_replica if name not in skipped}
    worse = {name: tokens for name, tokens in gaps.items() if tokens is not None and tokens > 0}
    tokens = sum(worse.values())
    now, before = _gap(evidence.now.total), _gap(evidence.before.total)
    if now is None or tokens < GROWN * evidence.now.total.prompt:
        return None
    names = sorted(worse, key=lambda name: worse[name], reverse=True)
    return Finding(
        CauseKind.INDEX_STALE,
        tokens,
        CERTAINTY,
        f"Routers predict {percent(now)} of the prompt tokens more than engines find cached; before, it was "
        f"{percent(before or 0.0)}. Most of it at {listed(names)}.",
        "Look whether something else uses these engines (requests that do not come through a router, other "
        "adapters), whether they have less cache than their replica says, and whether their KV events arrive.",
        {"gap_ratio": round(now, 4), "usual_gap_ratio": before and round(before, 4), "replicas": names},
    )


def _grown(evidence: Evidence, replica: str) -> float | None:
    now = evidence.now.by_replica[replica]
    gap, usual = _gap(now), _gap(evidence.before.by_replica.get(replica, Sums()))
    if usual is None:
        usual = _gap(evidence.before.total)
    return None if gap is None or usual is None else (gap - max(usual, 0.0)) * now.predicted_prompt


def _gap(sums: Sums) -> float | None:
    """Predicted less delivered, of the prompt tokens with a prediction."""
    return (sums.predicted - sums.predicted_cached) / sums.predicted_prompt if sums.predicted_prompt else None
