"""Whether telemetry keeps up with its own work. If it does not, silence means nothing."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db.models import Count, DateTimeField, F, FloatField, Max, Min, QuerySet, Value

from controlplane.isolation import EXPIRES
from controlplane.models import ItemFailure, PeriodicTask, WorkerLiveness
from controlplane.services.worker_liveness import is_late
from telemetry.models import Alert, AlertRule, ScrapeShard
from telemetry.services.notifications.outbox import due

INTERVALS = 3  # behind by more than so many, and it does not keep up
DELIVERY_EVERY_S = 5  # as beat knocks
SCRAPING, EVALUATING, DELIVERING, FIRING = "scraping", "evaluating alert rules", "delivering messages", "firing"
WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Pulse:
    """What every page says of telemetry."""

    firing: int  # alerts, of those that were asked for
    late: list[str]  # what is more than ``INTERVALS`` intervals late, in words; [] where all is well
    worker_silence_s: float | None  # since a worker last ran scheduled work, where that is too long ago
    failing: list[str]  # periodic tasks some of whose items fail, and how many; [] where none does


def pulse(firing: QuerySet[Alert], now: datetime) -> Pulse:
    """How many of these alerts there are, and what is late. One query."""
    every_s = settings.SCRAPE_INTERVAL_S
    found = {what: (at, figure) for what, at, figure in _asked(firing, now) if figure is not None}
    failing = [f"{task.label} ({found.pop(task.value)[1]:.0f})" for task in PeriodicTask if task.value in found]
    alerts = int(found.pop(FIRING, (None, 0))[1])
    silence_s = _lag_s(*found.pop(WORKER, (None, 0.0)), now, 0.0)
    work = (
        (SCRAPING, every_s, every_s),  # how often it is done, and when after its time it is overdue
        (EVALUATING, max(every_s, 5), max(every_s, 5)),
        (DELIVERING, DELIVERY_EVERY_S, 0),
    )
    lags = [(what, each, _lag_s(*found.get(what, (None, 0.0)), now, grace)) for what, each, grace in work]
    late = [f"{what} is {lag:.0f} s late" for what, each, lag in lags if lag > INTERVALS * each]
    return Pulse(alerts, late, silence_s if is_late(silence_s) else None, failing)


def _lag_s(at: datetime | None, known_s: float, now: datetime, grace_s: float) -> float:
    return known_s if at is None else max(known_s, (now - at).total_seconds() - grace_s)


def falling_behind(now: datetime) -> list[str]:
    """What is more than ``INTERVALS`` intervals late, in words; [] where all is well. One query."""
    return pulse(Alert.objects.none(), now).late


def _asked(firing: QuerySet[Alert], now: datetime) -> Any:
    """(what, the oldest time at which its work was due, its lag in seconds or its number)."""
    none, nothing = Value(None, DateTimeField()), Value(0.0, FloatField())
    shards = _row(ScrapeShard.objects.all(), SCRAPING).annotate(at=Min("due_at"), figure=Max("lag_s"))
    rules = _row(AlertRule.objects.filter(enabled=True, evaluated_at__isnull=False), EVALUATING)
    messages = _row(due(now), DELIVERING)
    worker = _row(WorkerLiveness.objects.all(), WORKER)
    items = ItemFailure.objects.filter(at__gt=now - EXPIRES).order_by().annotate(what=F("task")).values_list("what")
    alerts = _row(firing, FIRING).annotate(at=none, figure=Count("pk", output_field=FloatField()))
    return shards.union(
        rules.annotate(at=Min("evaluated_at"), figure=nothing),
        messages.annotate(at=Min("next_at"), figure=nothing),
        worker.annotate(at=Min("seen_at"), figure=nothing),
        items.annotate(at=Min("since"), figure=Count("pk", output_field=FloatField())),
        alerts,
        all=True,
    )


def _row(rows: QuerySet[Any], what: str) -> Any:
    return rows.order_by().annotate(what=Value(what)).values_list("what")
