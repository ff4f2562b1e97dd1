"""Draining an outbox whose messages are all due: a receiver that returns after a day has thousands waiting.

Four channels have 20,000 messages about alerts that fired and resolved. The sender responds at once, so the time is the
database's and this process's. While they wait, the status that every page shows is read.
"""

from __future__ import annotations

import statistics
import time
from datetime import datetime

from tests.benchmarks.telemetry.stand import standing

SIZES = (2_500, 20_000)
CHANNELS = 4
GOAL_S = 60.0
STATUS_READS = 50


def main() -> None:
    print(f"{'due messages':>14}{'drained, s':>12}{'ms a message':>14}{'status of a page, ms':>22}")
    for size in SIZES:
        with standing():
            drained_s, status_ms = measure(size)
        print(f"{size:>14,}{drained_s:>12.1f}{1000 * drained_s / size:>14.2f}{status_ms:>22.2f}", flush=True)
    print(f"goal: {SIZES[-1]:,} in under {GOAL_S:.0f} s: {'met' if drained_s < GOAL_S else 'WRONG'}")


def measure(size: int) -> tuple[float, float]:
    """(seconds to drain so many messages, milliseconds of a page's status while all are due)."""
    from telemetry.channels.base import Receipt
    from telemetry.models import Alert, Notification
    from telemetry.services.notifications.channels import create_channel
    from telemetry.services.notifications.outbox import deliver_due
    from telemetry.services.self_monitoring import telemetry_status

    now = datetime.now().astimezone()
    for number in range(CHANNELS):
        queue_due(create_channel(f"c{number}", config={"url": "https://hooks.example/x"}), size // CHANNELS, now)
    status_s = []
    for _ in range(STATUS_READS):
        started = time.perf_counter()
        telemetry_status(Alert.objects.none(), now)
        status_s.append(time.perf_counter() - started)
    started = time.perf_counter()
    while deliver_due(sender=lambda *_: Receipt(204)):
        pass
    drained_s = time.perf_counter() - started
    if Notification.objects.exclude(state="delivered").exists():
        raise AssertionError("some messages were not delivered")
    return drained_s, 1000 * statistics.median(status_s)


def queue_due(channel: object, count: int, now: datetime) -> None:
    """Queue messages of a channel, two about each alert, that are due."""
    from telemetry.models import Notification

    kinds = ("firing", "resolved")
    Notification.objects.bulk_create(
        Notification(
            channel=channel,
            kind=kinds[number % 2],
            alert_ids=[number // 2],
            payload={"data": {"summary": "Hit rate drop of pool chat", "labels": {"pool": "chat"}}},
            next_at=now,
            created_at=now,
        )
        for number in range(count)
    )
