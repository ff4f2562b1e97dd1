"""All judges' answers, the likeliest first.

Theory of operation. Each judge says how many tokens its cause explains and how sure it is. Their order is that of the
product, as a share of what was lost: a cause that is certain and explains little stands behind one that is likely and
explains it all. What one event explains shows in several figures, so judges of what is seen (the index is stale,
affinity is given up, the cache is too small) leave out replicas and revisions that something happened to. An event is
named only where the replicas, prompts or requests that it touched carry enough of the loss.
"""

from __future__ import annotations

from collections.abc import Callable

from telemetry.causes import policies, replicas, workload
from telemetry.causes.cause import Cause, CauseKind, Finding
from telemetry.causes.evidence import Evidence

Judge = Callable[[Evidence], Finding | None]
JUDGES: tuple[Judge, ...] = (
    replicas.judge_silent_engine,
    workload.judge_prompt_change,
    replicas.judge_restart,
    replicas.judge_loss,
    replicas.judge_addition,
    policies.judge_revision,
    policies.judge_overflow,
    workload.judge_workload_change,
    workload.judge_capacity,
    policies.judge_stale_index,
)
EVENTS = frozenset({CauseKind.REPLICA_RESTARTED, CauseKind.REPLICA_LOST, CauseKind.REPLICA_ADDED, CauseKind.REVISION})
CARRIES = 0.4  # of the lost tokens, at least, of what an event touched: else it is near the drop, and not its cause
LEAST = 0.05  # confidence of a cause that is worth a word


def rank(evidence: Evidence) -> list[Cause]:
    """The causes that explain something, likeliest first; none where nothing was lost, or nothing is known."""
    if evidence.lost <= 0:
        return []
    found = [finding for judge in JUDGES if (finding := judge(evidence)) is not None]
    causes = [_cause(finding, evidence) for finding in found]
    likely = [cause for cause in causes if cause.confidence >= LEAST and _has_evidence(cause)]
    return sorted(likely, key=lambda cause: cause.confidence, reverse=True)


def _has_evidence(cause: Cause) -> bool:
    """Whether what an event touched carries enough of the loss; what is no event is measured itself."""
    return cause.kind not in EVENTS or cause.evidence["explained_ratio"] >= CARRIES


def _cause(finding: Finding, evidence: Evidence) -> Cause:
    share = min(max(finding.tokens, 0.0) / evidence.lost, 1.0)
    told = {
        "explained_tokens": round(min(max(finding.tokens, 0.0), evidence.lost)),
        "lost_tokens": round(evidence.lost),
        "explained_ratio": round(share, 3),
        **finding.evidence,
    }
    return Cause(finding.kind, round(finding.certainty * share, 3), finding.summary, told, finding.advice)
