"""The kinds of rules, a file each: settings, a pure judgement, a sentence."""

from __future__ import annotations

from telemetry.alerts.kinds import (
    error_ratio,
    evaluator_lag,
    hit_rate_drop,
    hit_rate_floor,
    kv_pressure,
    load_skew,
    no_data,
    prediction_gap,
    replica_down,
    replica_ejected,
    rollout_stuck,
    ttft_objective,
)
from telemetry.alerts.kinds.base import Asked, Kind, RuleSettings, Where

KINDS: dict[str, Kind] = {
    module.KIND.name: module.KIND
    for module in (
        hit_rate_drop,
        hit_rate_floor,
        prediction_gap,
        ttft_objective,
        error_ratio,
        replica_down,
        replica_ejected,
        kv_pressure,
        load_skew,
        rollout_stuck,
        evaluator_lag,
        no_data,
    )
}

__all__ = ["KINDS", "Asked", "Kind", "RuleSettings", "Where"]
