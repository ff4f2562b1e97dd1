"""Why a hit rate fell: a function for each cause evaluates the evidence, and ``rank`` orders the results. Pure.

Theory of operation. Each function returns how many tokens its cause explains, and its certainty. Causes are ordered by
the product, as a share of the loss: a certain cause that explains little comes after a likely one that explains all.
One event shows in several figures, so the functions that measure an effect (stale index, overflow, cache too small)
leave out replicas and revisions to which something happened. An event is named only if the replicas, prompts or
requests that it affected lost enough.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from telemetry.causes import policies, replicas, workload
from telemetry.causes.evidence import Cause, CauseKind, Evidence, Finding

__all__ = ["Cause", "CauseKind", "Evidence", "at_most_one", "rank"]

CHECKS: tuple[Callable[[Evidence], Finding | None], ...] = (
    replicas.check_silent_engine,
    replicas.check_caching_off,
    workload.check_prompt_change,
    replicas.check_restart,
    replicas.check_loss,
    replicas.check_addition,
    policies.check_revision,
    policies.check_overflow,
    workload.check_workload_change,
    workload.check_capacity,
    policies.check_stale_index,
)
EVENT_CAUSES = frozenset(
    {CauseKind.REPLICA_RESTARTED, CauseKind.REPLICA_LOST, CauseKind.REPLICA_ADDED, CauseKind.REVISION}
)
MIN_EXPLAINED = 0.4  # of the loss; an event that explains less happened near the drop and did not cause it
MIN_CONFIDENCE = 0.05


def rank(evidence: Evidence) -> list[Cause]:
    """The causes that explain something, most likely first; none if nothing was lost or nothing is known."""
    if evidence.lost <= 0:
        return []
    findings = [finding for check in CHECKS if (finding := check(evidence)) is not None]
    causes = [_cause(finding, evidence) for finding in findings]
    likely = [cause for cause in causes if cause.confidence >= MIN_CONFIDENCE and _explains_enough(cause)]
    return at_most_one(sorted(likely, key=lambda cause: cause.confidence, reverse=True))


def at_most_one(causes: list[Cause]) -> list[Cause]:
    """The causes with whole percent as confidences whose sum is at most 1: they may explain the same tokens."""
    scale = 100 / max(sum(cause.confidence for cause in causes), 1.0)
    percents = [round(cause.confidence * scale) for cause in causes]
    while sum(percents) > 100:
        percents[percents.index(max(percents))] -= 1
    return [replace(cause, confidence=number / 100) for cause, number in zip(causes, percents, strict=True)]


def _explains_enough(cause: Cause) -> bool:
    return cause.kind not in EVENT_CAUSES or cause.evidence["explained_ratio"] >= MIN_EXPLAINED


def _cause(finding: Finding, evidence: Evidence) -> Cause:
    share = min(max(finding.tokens, 0.0) / evidence.lost, 1.0)
    document = {
        "explained_tokens": round(min(max(finding.tokens, 0.0), evidence.lost)),
        "lost_tokens": round(evidence.lost),
        "explained_ratio": round(share, 3),
        **finding.evidence,
    }
    return Cause(finding.kind, round(finding.certainty * share, 3), finding.summary, document, finding.advice)
