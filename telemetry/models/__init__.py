"""Django models of telemetry. ``scraping``, ``storage``, ``alerts`` and ``services`` write their rows."""

from telemetry.models.alert import (
    Alert,
    AlertHistoryEntry,
    AlertRule,
    AlertState,
    AlertTransition,
    RuleKind,
    Severity,
    Silence,
    SuppressionReason,
)
from telemetry.models.decision import BreakdownBin, CapacityCurve, Decision, DecisionCursor, ReplayState
from telemetry.models.notification import (
    Channel,
    DeliveryAttempt,
    Heartbeat,
    Notification,
    NotificationKind,
    NotificationState,
    OutboxState,
    ShortLink,
)
from telemetry.models.reading import BucketLayout, Reading, RollupRepair, RollupState, RouterReading
from telemetry.models.scrape import STARTING_S, Health, MetricsServer, ReadPool, ScrapeShard, ScrapeState
from telemetry.models.what_if import OPEN_PREDICTIONS, Prediction, PredictionState, WhatIf, WhatIfState

__all__ = [
    "OPEN_PREDICTIONS",
    "STARTING_S",
    "Alert",
    "AlertHistoryEntry",
    "AlertRule",
    "AlertState",
    "AlertTransition",
    "BreakdownBin",
    "BucketLayout",
    "CapacityCurve",
    "Channel",
    "Decision",
    "DecisionCursor",
    "DeliveryAttempt",
    "Health",
    "Heartbeat",
    "MetricsServer",
    "Notification",
    "NotificationKind",
    "NotificationState",
    "OutboxState",
    "Prediction",
    "PredictionState",
    "ReadPool",
    "Reading",
    "ReplayState",
    "RollupRepair",
    "RollupState",
    "RouterReading",
    "RuleKind",
    "ScrapeShard",
    "ScrapeState",
    "Severity",
    "ShortLink",
    "Silence",
    "SuppressionReason",
    "WhatIf",
    "WhatIfState",
]
