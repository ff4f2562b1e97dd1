"""The alert rules that every pool starts with.

A healthy pool keeps their limits whatever its traffic: they find outages and lasting overload, not missed objectives.
An operator who has objectives narrows them. A rule that an operator changes, disables or deletes stays so: rules are
created once, with their pool.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from telemetry.models import RuleKind, Severity


@dataclass(frozen=True, slots=True)
class DefaultRule:
    """A rule as it is created with a pool."""

    name: str
    kind: RuleKind
    severity: Severity = Severity.WARNING
    settings: Mapping[str, Any] = field(default_factory=dict)


def default_rules(scrape_interval_s: float) -> tuple[DefaultRule, ...]:
    """All of them; the first is the hit rate's."""
    # A worker that restarts evaluates again after about 5 s; three scrapes may be lost.
    behind_s = max(30.0, 3 * scrape_interval_s)
    return (
        DefaultRule("Hit rate drop", RuleKind.HIT_RATE_DROP),
        DefaultRule("Replica down", RuleKind.REPLICA_DOWN),
        DefaultRule("No data", RuleKind.NO_DATA, Severity.CRITICAL),
        # Three in ten first tokens later than 5 s for a quarter of an hour: beyond the prefill of a long prompt.
        DefaultRule(
            "TTFT objective", RuleKind.TTFT_OBJECTIVE, settings={"within_s": 5.0, "long_s": 900.0, "short_s": 300.0}
        ),
        DefaultRule("Error ratio", RuleKind.ERROR_RATIO, Severity.CRITICAL),
        DefaultRule("Replica ejected", RuleKind.REPLICA_EJECTED),
        # Affinity skews a quiet pool on purpose: only skew that makes requests wait counts.
        DefaultRule("Load skew", RuleKind.LOAD_SKEW, settings={"min_waiting": 1.0}),
        DefaultRule("KV pressure", RuleKind.KV_PRESSURE),
        DefaultRule("Configuration not converged", RuleKind.ROLLOUT_STUCK),
        # Confirmed by a second evaluation: the first after a stop of the whole control plane is late by design.
        DefaultRule(
            "Telemetry behind", RuleKind.EVALUATOR_LAG, Severity.CRITICAL, {"behind_s": behind_s, "for_s": 10.0}
        ),
    )
