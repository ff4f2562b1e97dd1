"""What did happen, one noun per file. ``scraping``, ``collecting``, ``alerts`` and ``services`` write these rows."""

from telemetry.models.alert import Alert, AlertState
from telemetry.models.alert_rule import AlertRule, RuleKind, Severity
from telemetry.models.alert_step import AlertMove, AlertStep
from telemetry.models.bucket_layout import BucketLayout
from telemetry.models.channel import Channel
from telemetry.models.decision import Decision, DecisionCursor
from telemetry.models.heartbeat import Heartbeat
from telemetry.models.ladder import CapacityCurve, LadderBin, ReplayState
from telemetry.models.metrics_server import MetricsServer, ReadPool
from telemetry.models.notification import DeliveryAttempt, Notification, NotificationKind, NotificationState
from telemetry.models.reading import Reading, RouterReading
from telemetry.models.rollup import RollupRepair, RollupState
from telemetry.models.scrape_shard import ScrapeShard
from telemetry.models.scrape_state import STARTING_S, Health, ScrapeState
from telemetry.models.short_link import ShortLink
from telemetry.models.silence import Silence

__all__ = [
    "STARTING_S",
    "Alert",
    "AlertMove",
    "AlertRule",
    "AlertState",
    "AlertStep",
    "BucketLayout",
    "CapacityCurve",
    "Channel",
    "Decision",
    "DecisionCursor",
    "DeliveryAttempt",
    "Health",
    "Heartbeat",
    "LadderBin",
    "MetricsServer",
    "Notification",
    "NotificationKind",
    "NotificationState",
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
]
