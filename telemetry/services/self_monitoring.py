"""How far scraping is behind its time. Charts of a late telemetry look like a quiet fleet.

What the control plane tells of itself to those who watch it: routers, lags and backlogs, in ten short queries.

Whether telemetry keeps up with its own work. If it does not, silence means nothing.

Reports from a web process that alert rules are no longer evaluated: the worker that would report it is gone.

Theory of operation. Every web process looks every ``CHECK_EVERY_S`` whether rules were evaluated lately: one query. If
not, it takes the lock of evaluators, evaluates only the rules of kind ``evaluator_lag``, and delivers what is due. It
does not write down that it evaluated, so everything else still shows how late the worker is. When a worker is back,
that worker resolves the alert.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.conf import settings
from django.db import DatabaseError, connection
from django.db.models import Count, DateTimeField, F, FloatField, Max, Min, Q, QuerySet, Value
from django.utils import timezone

from controlplane.isolation import EXPIRES, failing_items
from controlplane.models import ConfigSnapshot, ItemFailure, PeriodicTask, Router, WorkerLiveness
from controlplane.services.snapshots import newest_snapshot
from controlplane.services.worker_liveness import is_late, worker_silence_s
from telemetry.alerts.notifications import notify_due
from telemetry.alerts.pipeline import evaluate
from telemetry.metrics.windows import Window
from telemetry.models import Alert, AlertRule, Notification, NotificationState, RuleKind, ScrapeShard, ScrapeState
from telemetry.services.notifications.outbox import deliver_due, due
from telemetry.storage.locks import EVALUATE, advisory_lock
from telemetry.storage.reachable import SHORTEST, reachable_by_pool


@dataclass(frozen=True, slots=True)
class ShardLag:
    """One shard of the fleet; seconds."""

    number: int
    lag_s: float  # behind its time: of its last tick, or of the one that is overdue
    took_s: float | None  # from the beginning of the last tick until all was stored; None while it runs
    missed: int  # ticks that never were
    targets: int
    failures: int


def scrape_lags(now: datetime) -> list[ShardLag]:
    """Of each shard, by number; empty before the first scrape. One query."""
    return [
        ShardLag(shard.number, _shard_lag_s(shard, now), shard.took_s, shard.missed, shard.targets, shard.failures)
        for shard in ScrapeShard.objects.order_by("number")
    ]


def refused_since() -> datetime | None:
    """Since when the database has had no room for readings; None: it takes them. One query."""
    since: datetime | None = ScrapeShard.objects.aggregate(at=Min("refused_since"))["at"]
    return since


def _shard_lag_s(shard: ScrapeShard, now: datetime) -> float:
    overdue_s = (now - shard.due_at).total_seconds() - settings.SCRAPE_INTERVAL_S
    return max(shard.lag_s, overdue_s)


@dataclass(frozen=True, slots=True)
class Figure:
    """One series."""

    name: str
    text: str
    value: float | None  # None: unknown, and left out
    labels: tuple[tuple[str, str], ...] = ()


def own_metrics(now: datetime) -> list[Figure]:
    """All of them, those of one name beside each other."""
    desired = newest_snapshot()
    outbox = Notification.objects.filter(state=NotificationState.PENDING).aggregate(
        waiting=Count("id"), since=Min("next_at", filter=Q(next_at__lte=now))
    )
    evaluated = AlertRule.objects.filter(enabled=True).aggregate(Max("evaluated_at"))["evaluated_at__max"]
    scraped = ScrapeState.objects.aggregate(Max("at"))["at__max"]
    return [
        *_router_figures(desired, now),
        Figure("outbox_pending", "Messages that wait to be delivered.", outbox["waiting"]),
        Figure("outbox_overdue_seconds", "How long the oldest one has been due.", _since(outbox["since"], now) or 0.0),
        Figure("evaluation_age_seconds", "Since alert rules were last evaluated.", _since(evaluated, now)),
        Figure("worker_silence_seconds", "Since a worker last ran scheduled work.", worker_silence_s(now)),
        Figure("scrape_age_seconds", "Since the fleet was last scraped.", _since(scraped, now)),
        Figure(
            "readings_refused_seconds",
            "Since the database has no room for readings.",
            _since(refused_since(), now) or 0.0,
        ),
        *_shard_figures(now),
        *_reachable_figures(now),
        *(
            Figure("failing_items", "Items of a periodic task whose last run failed.", count, (("task", task.value),))
            for task, count in failing_items(now).items()
        ),
    ]


def _reachable_figures(now: datetime) -> list[Figure]:
    """Of each pool over the last half hour; a pool of which it is unknown has no series. One query."""
    shares = [
        (share, (("pool", pool),))
        for pool, share in reachable_by_pool(None, Window(now - SHORTEST, now, SHORTEST.total_seconds())).items()
    ]
    return [
        *(
            Figure("reachable_ratio", "Reachable share of prompt tokens, 0 to 1.", of.ratio, pool)
            for of, pool in shares
        ),
        *(Figure("reachable_standard_error", "Of that share.", of.standard_error, pool) for of, pool in shares),
        *(Figure("reachable_requests", "Requests it rests on.", of.requests, pool) for of, pool in shares),
    ]


def _shard_figures(now: datetime) -> list[Figure]:
    """Of each part of the fleet that is scraped together."""
    shards = [(lag, (("shard", str(lag.number)),)) for lag in scrape_lags(now)]
    return [
        *(Figure("scrape_lag_seconds", "How far scraping is behind its time.", lag.lag_s, of) for lag, of in shards),
        *(Figure("scrape_took_seconds", "How long the last tick took.", lag.took_s, of) for lag, of in shards),
        *(Figure("scrape_missed_ticks", "Ticks that never were.", lag.missed, of) for lag, of in shards),
        *(Figure("scrape_targets", "Replicas and routers scraped.", lag.targets, of) for lag, of in shards),
        *(Figure("scrape_failures", "Those that gave nothing.", lag.failures, of) for lag, of in shards),
    ]


def _router_figures(desired: ConfigSnapshot | None, now: datetime) -> list[Figure]:
    wanted = (desired.number, desired.sha256) if desired else (0, "")
    runs_it = Q(running_number=wanted[0], running_sha256=wanted[1])
    found = Router.objects.aggregate(
        in_sync=Count("id", filter=Q(lost_at=None) & runs_it),
        behind=Count("id", filter=Q(lost_at=None) & (~runs_it | Q(running_number=None))),
        lost=Count("id", filter=Q(lost_at__isnull=False)),
        refusing=Count("id", filter=Q(last_nack__isnull=False)),
        failing=Count("id", filter=Q(push_failures__gt=0)),
    )
    lag_s = _since(desired.created_at, now) if desired and found["behind"] else 0.0
    states = [
        Figure("routers", "Routers, by whether they run the newest configuration.", found[state], (("state", state),))
        for state in ("in_sync", "behind", "lost")
    ]
    return [
        *states,
        Figure("routers_refusing", "Routers that refused what they were last pushed.", found["refusing"]),
        Figure("routers_unreachable", "Routers that the last push did not reach.", found["failing"]),
        Figure("config_number", "The newest configuration.", desired.number if desired else None),
        Figure("config_lag_seconds", "Since there is a configuration that some present router does not run.", lag_s),
    ]


def _since(moment: datetime | None, now: datetime) -> float | None:
    return None if moment is None else max(0.0, (now - moment).total_seconds())


INTERVALS = 3  # behind by more than so many, and it does not keep up
DELIVERY_EVERY_S = 5  # as beat knocks
SCRAPING, EVALUATING, DELIVERING, FIRING = "scraping", "evaluating alert rules", "delivering messages", "firing"
WORKER = "worker"


@dataclass(frozen=True, slots=True)
class TelemetryStatus:
    """What every page says of telemetry."""

    firing: int  # alerts, of those that were asked for
    late: list[str]  # what is more than ``INTERVALS`` intervals late, in words; [] where all is well
    worker_silence_s: float | None  # since a worker last ran scheduled work, where that is too long ago
    failing: list[str]  # periodic tasks some of whose items fail, and how many; [] where none does


def telemetry_status(firing: QuerySet[Alert], now: datetime) -> TelemetryStatus:
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
    return TelemetryStatus(alerts, late, silence_s if is_late(silence_s) else None, failing)


def _lag_s(at: datetime | None, known_s: float, now: datetime, grace_s: float) -> float:
    return known_s if at is None else max(known_s, (now - at).total_seconds() - grace_s)


def overdue_work(now: datetime) -> list[str]:
    """What is more than ``INTERVALS`` intervals late, in words; [] where all is well. One query."""
    return telemetry_status(Alert.objects.none(), now).late


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


CHECK_EVERY_S = 10.0
LATE_AFTER_S = 30.0  # without an evaluation, and at least three intervals: a worker that restarts takes about 5 s

log = logging.getLogger(__name__)


def start() -> threading.Thread:
    """Check from now on, in a thread that ends with the process."""
    thread = threading.Thread(target=_run, name="watchdog", daemon=True)
    thread.start()
    return thread


def check(now: datetime) -> bool:
    """Evaluate ``evaluator_lag`` rules and deliver what is due, if no worker evaluates; whether that was done."""
    if not _is_evaluation_late(now):
        return False
    with advisory_lock(EVALUATE) as ours:
        if ours:
            notify_due(now, evaluate(_rules().filter(kind=RuleKind.EVALUATOR_LAG), now, note_time=False))
    deliver_due()
    return ours


def _rules() -> QuerySet[AlertRule]:
    return AlertRule.objects.filter(enabled=True).select_related("pool", "group")


def _is_evaluation_late(now: datetime) -> bool:
    evaluated_at = _rules().aggregate(at=Max("evaluated_at"))["at"]
    allowed = timedelta(seconds=max(LATE_AFTER_S, 3 * settings.SCRAPE_INTERVAL_S))
    return evaluated_at is not None and now - evaluated_at > allowed


def _run() -> None:
    was_failing = False
    while True:
        time.sleep(CHECK_EVERY_S)  # the thread's clock, not a wait for something
        try:
            check(timezone.now())
            was_failing = False
        except DatabaseError:
            pass  # /readyz and every page report it
        except Exception:
            if not was_failing:
                log.exception("the watchdog cannot check the worker")
            was_failing = True
        finally:
            connection.close()
