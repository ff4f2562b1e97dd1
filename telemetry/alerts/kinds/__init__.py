"""The kinds of alert rules: the settings of each, a pure evaluation and a summary for people."""

from __future__ import annotations

from telemetry.alerts.kinds.base import Kind, RuleSettings, Scope
from telemetry.alerts.kinds.control_plane import (
    EVALUATOR_LAG,
    NO_DATA,
    ROLLOUT_STUCK,
    ROUTER_LOST,
    ROUTERS_APART,
)
from telemetry.alerts.kinds.hit_rate_drop import HIT_RATE_DROP
from telemetry.alerts.kinds.hit_rates import HIT_RATE_FLOOR, PREDICTION_GAP
from telemetry.alerts.kinds.replicas import KV_PRESSURE, LOAD_SKEW, METRICS_UNREADABLE, REPLICA_DOWN, REPLICA_EJECTED
from telemetry.alerts.kinds.requests import ERROR_RATIO, TRAFFIC_VANISHED, TTFT_OBJECTIVE
from telemetry.alerts.kinds.response_caches import CACHE_SHARE_DROP, CACHE_STORE_DOWN, SEMANTIC_CACHE_PRECISION

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        HIT_RATE_DROP,
        HIT_RATE_FLOOR,
        PREDICTION_GAP,
        TTFT_OBJECTIVE,
        ERROR_RATIO,
        TRAFFIC_VANISHED,
        REPLICA_DOWN,
        METRICS_UNREADABLE,
        REPLICA_EJECTED,
        KV_PRESSURE,
        LOAD_SKEW,
        CACHE_STORE_DOWN,
        CACHE_SHARE_DROP,
        SEMANTIC_CACHE_PRECISION,
        ROUTER_LOST,
        ROUTERS_APART,
        ROLLOUT_STUCK,
        EVALUATOR_LAG,
        NO_DATA,
    )
}

__all__ = ["KINDS", "Kind", "RuleSettings", "Scope"]
