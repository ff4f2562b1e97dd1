"""What did happen, one noun per file. Only ``scraping``, ``alerts`` and ``services`` write these rows."""

from telemetry.models.alert import Alert, AlertState
from telemetry.models.alert_rule import AlertRule, RuleKind
from telemetry.models.bucket_layout import BucketLayout
from telemetry.models.channel import Channel
from telemetry.models.notification import DeliveryAttempt, Notification, NotificationKind, NotificationState
from telemetry.models.reading import Reading, RouterReading
from telemetry.models.scrape_state import Health, ScrapeState

__all__ = [
    "Alert",
    "AlertRule",
    "AlertState",
    "BucketLayout",
    "Channel",
    "DeliveryAttempt",
    "Health",
    "Notification",
    "NotificationKind",
    "NotificationState",
    "Reading",
    "RouterReading",
    "RuleKind",
    "ScrapeState",
]
