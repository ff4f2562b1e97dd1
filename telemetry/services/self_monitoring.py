"""Monitors telemetry itself: the control plane's own metrics, late or failing work, and a watchdog in web processes.

If telemetry falls behind, the absence of alerts means nothing, so pages, ``/metrics`` and heartbeats report it. The
watchdog covers a worker that is gone, which could not report itself: every web process checks every ``CHECK_EVERY_S``
whether rules were evaluated lately. If not, it takes the evaluators' lock, evaluates only rules of kind
``evaluator_lag``, and delivers what is due. It does not record an evaluation, so everything else still shows how late
the worker is. When a worker is back, that worker resolves the alert.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache, partial
from operator import attrgetter
from typing import Any

from django.conf import settings
from django.core.exceptions import EmptyResultSet
from django.db import DatabaseError, connection
from django.db.models import Count, DateTimeField, Exists, F, FloatField, Max, Min, Q, QuerySet, Value
from django.db.models.functions import Least
from django.utils import timezone

from controlplane.isolation import EXPIRES, failing_items, is_late, worker_silence_s
from controlplane.models import ConfigSnapshot, ItemFailure, PeriodicTask, Rollout, Router, WorkerLiveness
from controlplane.services.routers import responding
from controlplane.services.snapshots import newest_snapshot
from telemetry.alerts.notifications import notify_due
from telemetry.alerts.pipeline import evaluate, last_evaluation
from telemetry.metrics.windows import Window
from telemetry.models import (
    Alert,
    AlertRule,
    Channel,
    EvaluationState,
    Notification,
    NotificationState,
    OutboxState,
    RuleKind,
    ScrapeShard,
    ScrapeState,
)
from telemetry.services.lab.scaling import scaling_of
from telemetry.services.notifications.outbox import deliver_due
from telemetry.storage.locks import EVALUATE, advisory_lock
from telemetry.storage.reachable import MIN_WINDOW, reachable_by_pool

log = logging.getLogger(__name__)
LATE_INTERVALS = 3  # work that is overdue by more than this many intervals is late
DELIVERY_EVERY_S = 5  # the interval at which beat starts deliveries
CHECK_EVERY_S = 10.0
NO_ROLLOUTS = Rollout.objects.none()
LATE_AFTER_S = 30.0  # without an evaluation, and at least three intervals: a worker restarts in about 5 s
SCRAPING, EVALUATING, DELIVERING = "scraping", "evaluating alert rules", "delivering messages"
FIRING, CANARIES, WORKER, ROUTERS, REFUSED, CHANNELS = "firing", "canaries", "worker", "routers", "refused", "channels"
_COMPILED_AT = datetime(2000, 1, 1, tzinfo=UTC)  # every time in a query is relative to the present


@dataclass(frozen=True, slots=True)
class OwnMetric:
    """One series of the control plane's ``/metrics``."""

    name: str
    text: str
    value: float | None  # None: unknown, and left out
    labels: tuple[tuple[str, str], ...] = ()


def shard_lag_s(shard: ScrapeShard, now: datetime) -> float:
    """Seconds by which a shard's last cycle was late, or by which the next one is overdue."""
    return max(shard.lag_s, (now - shard.due_at).total_seconds() - settings.SCRAPE_INTERVAL_S)


Reader = Callable[[Any], float | None]
# Name, text, and the value of a row.
SHARD_METRICS: tuple[tuple[str, str, Reader], ...] = (
    ("scrape_took_seconds", "How long the last cycle took.", attrgetter("took_s")),
    ("scrape_missed_ticks", "Cycles that were missed.", attrgetter("missed")),
    ("scrape_targets", "Replicas and routers scraped.", attrgetter("targets")),
    ("scrape_failures", "Scrapes that failed in the last cycle.", attrgetter("failures")),
)
REACHABLE_METRICS: tuple[tuple[str, str, Reader], ...] = (
    ("reachable_ratio", "Reachable share of prompt tokens, 0 to 1.", attrgetter("ratio")),
    ("reachable_standard_error", "Standard error of reachable_ratio.", attrgetter("standard_error")),
    ("reachable_requests", "Requests from which reachable_ratio is computed.", attrgetter("requests")),
)
SCALING_METRICS: tuple[tuple[str, str, Reader], ...] = (
    ("pool_saturation_ratio", "Load of a pool's replicas, 0 to 1, over all routers.", attrgetter("saturation_ratio")),
    ("pool_waiting_work_seconds", "Time that a pool's waiting tokens need.", attrgetter("waiting_work_s")),
    ("pool_replicas", "Active replicas of a pool that were scraped lately.", attrgetter("replicas")),
    ("pool_recommended_replicas", "Replicas that a pool needs.", attrgetter("recommended_replicas")),
)


def _metrics_of(label: str, rows: Mapping[str, Any], metrics: Sequence[tuple[str, str, Reader]]) -> Iterable[OwnMetric]:
    """The metrics of some rows, by the value of their label."""
    for name, text, value_of in metrics:
        for key, row in rows.items():
            yield OwnMetric(name, text, value_of(row), ((label, key),))


def refused_since() -> datetime | None:
    """Since when the database has lacked space for readings; None if it has space. One query."""
    since: datetime | None = ScrapeShard.objects.aggregate(at=Min("refused_since"))["at"]
    return since


def own_metrics(now: datetime) -> list[OwnMetric]:
    """The control plane's own metrics, series of the same name one after another.

    About 20 short queries, and two for each pool that could lose a replica.
    """
    desired = newest_snapshot()
    outbox = Notification.objects.filter(state=NotificationState.PENDING).aggregate(
        waiting=Count("id"), since=Min("next_at", filter=Q(next_at__lte=now))
    )
    evaluated = last_evaluation()
    scraped = ScrapeState.objects.aggregate(Max("at"))["at__max"]
    refused_s = _age_s(refused_since(), now) or 0.0
    shards = {str(shard.number): shard for shard in ScrapeShard.objects.order_by("number")}
    lag = ("scrape_lag_seconds", "How far scraping is behind schedule.", partial(shard_lag_s, now=now))
    reachable = reachable_by_pool(None, Window(now - MIN_WINDOW, now, MIN_WINDOW.total_seconds()))
    scalings = {scaling.pool: scaling for scaling in scaling_of(None, now)}
    return [
        *_router_metrics(desired, now),
        OwnMetric("outbox_pending", "Notifications that wait for delivery.", outbox["waiting"]),
        OwnMetric(
            "outbox_overdue_seconds",
            "How long the oldest notification has been due.",
            _age_s(outbox["since"], now) or 0.0,
        ),
        OwnMetric("evaluation_age_seconds", "Time since alert rules were last evaluated.", _age_s(evaluated, now)),
        OwnMetric("worker_silence_seconds", "Time since a worker last ran scheduled work.", worker_silence_s(now)),
        OwnMetric("scrape_age_seconds", "Time since the fleet was last scraped.", _age_s(scraped, now)),
        OwnMetric("readings_refused_seconds", "How long the database has lacked space for readings.", refused_s),
        *_metrics_of("shard", shards, [lag, *SHARD_METRICS]),
        *_metrics_of("pool", reachable, REACHABLE_METRICS),
        *_metrics_of("pool", scalings, SCALING_METRICS),
        *(
            OwnMetric(
                "failing_items", "Items of a periodic task whose last run failed.", count, (("task", task.value),)
            )
            for task, count in failing_items(now).items()
        ),
    ]


def _router_metrics(desired: ConfigSnapshot | None, now: datetime) -> Iterable[OwnMetric]:
    number, sha256 = (desired.number, desired.sha256) if desired else (0, "")
    is_current = Q(running_number=number, running_sha256=sha256)
    counts = Router.objects.aggregate(
        in_sync=Count("id", filter=Q(lost_at=None) & is_current),
        behind=Count("id", filter=Q(lost_at=None) & (~is_current | Q(running_number=None))),
        lost=Count("id", filter=Q(lost_at__isnull=False)),
        rejecting=Count("id", filter=Q(last_nack__isnull=False)),
        unreachable=Count("id", filter=Q(push_failures__gt=0)),
    )
    text = "Routers, by whether they run the newest configuration."
    for state in ("in_sync", "behind", "lost"):
        yield OwnMetric("routers", text, counts[state], (("state", state),))
    yield OwnMetric("routers_refusing", "Routers that rejected the last push.", counts["rejecting"])
    yield OwnMetric("routers_unreachable", "Routers that the last push did not reach.", counts["unreachable"])
    yield OwnMetric("config_number", "Number of the newest configuration.", desired.number if desired else None)
    lag_s = _age_s(desired.created_at, now) if desired and counts["behind"] else 0.0
    yield OwnMetric("config_lag_seconds", "Age of the newest configuration while a present router lacks it.", lag_s)


def _age_s(at: datetime | None, now: datetime) -> float | None:
    return None if at is None else max(0.0, (now - at).total_seconds())


@dataclass(frozen=True, slots=True)
class TelemetryStatus:
    """What every page shows of telemetry."""

    firing: int  # alerts
    canaries: int  # rollouts by stages that are open
    late: list[str]  # descriptions of late work
    worker_silence_s: float | None  # since a worker last ran scheduled work, if that is too long ago
    failing: list[str]  # periodic tasks with failing items, and how many
    routers_silent_since: datetime | None  # the last heartbeat of any router, if none responds
    refused_since: datetime | None  # since when the database has had no space for readings
    missing_channel: str  # "none": there is no channel; "off": all are disabled; "": one is on, or no router exists

    @property
    def explains_gap(self) -> bool:
        """Whether it says why the newest sample is old."""
        return bool(self.late or self.worker_silence_s or self.refused_since)


def telemetry_status(
    firing: QuerySet[Alert], now: datetime, canaries: QuerySet[Rollout] = NO_ROLLOUTS
) -> TelemetryStatus:
    """The numbers of these alerts and rollouts, late and failing work, and what notifies and responds. One query.

    No router responds if each is lost, or missed a heartbeat and cannot be scraped.
    """
    every_s = settings.SCRAPE_INTERVAL_S
    status = {work: (at, value) for work, at, value in _status_rows(firing, canaries, now) if value is not None}
    failing = [f"{task.label} ({status.pop(task.value)[1]:.0f})" for task in PeriodicTask if task.value in status]
    (heard_at, responding), (added_at, enabled) = status[ROUTERS], status[CHANNELS]
    silence_s = _lag_s(*status.get(WORKER, (None, 0.0)), now, 0.0)
    schedule = (
        (SCRAPING, every_s, every_s),  # interval, and time after ``at`` from which on it is overdue
        (EVALUATING, max(every_s, 5), max(every_s, 5)),
        (DELIVERING, DELIVERY_EVERY_S, 0),
    )
    lags = [
        (work, interval_s, _lag_s(*status.get(work, (None, 0.0)), now, grace_s))
        for work, interval_s, grace_s in schedule
    ]
    late = [f"{work} is {lag_s:.0f} s late" for work, interval_s, lag_s in lags if lag_s > LATE_INTERVALS * interval_s]
    return TelemetryStatus(
        firing=int(status.get(FIRING, (None, 0))[1]),
        canaries=int(status.get(CANARIES, (None, 0))[1]),
        late=late,
        worker_silence_s=silence_s if is_late(silence_s) else None,
        failing=failing,
        routers_silent_since=None if responding else heard_at,
        refused_since=status[REFUSED][0],
        missing_channel="" if enabled or not heard_at else "none" if added_at is None else "off",
    )


def _lag_s(at: datetime | None, recorded_s: float, now: datetime, grace_s: float) -> float:
    return recorded_s if at is None else max(recorded_s, (now - at).total_seconds() - grace_s)


def overdue_work(now: datetime) -> list[str]:
    """Descriptions of late work. One query."""
    return telemetry_status(Alert.objects.none(), now).late


def _status_rows(
    firing: QuerySet[Alert], canaries: QuerySet[Rollout], now: datetime
) -> list[tuple[str, datetime | None, float | None]]:
    """(work, the oldest time at which its work was due, its recorded lag in seconds or its number)."""
    sql, parameters = _schedule_query()
    parts = [(sql, [_shifted(parameter, now) for parameter in parameters])]
    for name, rows in ((FIRING, firing), (CANARIES, canaries)):
        with contextlib.suppress(EmptyResultSet):
            counted = _grouped(rows, Value(name), Value(None, DateTimeField()), _count())
            parts.append(counted.query.sql_with_params())
    with connection.cursor() as cursor:
        text = " union all ".join(f"({part})" for part, _ in parts)
        cursor.execute(text, [parameter for _, of_part in parts for parameter in of_part])
        return list(cursor.fetchall())


@cache
def _schedule_query() -> tuple[str, tuple[Any, ...]]:
    """SQL for the rows of work, and its parameters at ``_COMPILED_AT``. To build it takes far longer than to run it."""
    zero = Value(0.0, FloatField())
    evaluations = EvaluationState.objects.filter(Exists(AlertRule.objects.filter(enabled=True)))
    failures = ItemFailure.objects.filter(at__gt=_COMPILED_AT - EXPIRES)
    refused = ScrapeShard.objects.exclude(refused_since=None)
    rows = _grouped(ScrapeShard.objects.all(), Value(SCRAPING), Min("due_at"), Max("lag_s")).union(
        _grouped(evaluations, Value(EVALUATING), Min("at"), zero),
        _grouped(OutboxState.objects.all(), Value(DELIVERING), Min(Least("read_at", "due_since")), zero),
        _grouped(WorkerLiveness.objects.all(), Value(WORKER), Min("seen_at"), zero),
        _grouped(failures, F("task"), Min("since"), _count()),
        _grouped(Router.objects.all(), Value(ROUTERS), Max("last_seen_at"), _count(responding(_COMPILED_AT))),
        _grouped(refused, Value(REFUSED), Min("refused_since"), zero),
        _grouped(Channel.objects.all(), Value(CHANNELS), Max("created_at"), _count(Q(enabled=True))),
        all=True,
    )
    sql, parameters = rows.query.sql_with_params()
    return sql, tuple(parameters)


def _count(which: Q | None = None) -> Any:
    return Count("pk", filter=which, output_field=FloatField())


def _grouped(queryset: QuerySet[Any], work: Any, at: Any, value: Any) -> Any:
    return queryset.order_by().annotate(work=work).values_list("work").annotate(at=at, value=value)


def _shifted(parameter: Any, now: datetime) -> Any:
    """A parameter of ``_schedule_query`` at this time."""
    return now + (parameter - _COMPILED_AT) if isinstance(parameter, datetime) else parameter


def start() -> threading.Thread:
    """Start the watchdog, in a thread that ends with the process."""
    thread = threading.Thread(target=_run_watchdog, name="watchdog", daemon=True)
    thread.start()
    return thread


def check(now: datetime) -> bool:
    """If no worker evaluates, evaluate ``evaluator_lag`` rules and deliver what is due; whether that was done."""
    rules = AlertRule.objects.filter(enabled=True).select_related("pool", "group")
    evaluated_at = last_evaluation()
    max_age = timedelta(seconds=max(LATE_AFTER_S, 3 * settings.SCRAPE_INTERVAL_S))
    if evaluated_at is None or now - evaluated_at <= max_age:
        return False
    with advisory_lock(EVALUATE) as acquired:
        if acquired:
            notify_due(now, evaluate(rules.filter(kind=RuleKind.EVALUATOR_LAG), now, note_time=False))
    deliver_due()
    return acquired


def _run_watchdog() -> None:
    was_failing = False
    while True:
        time.sleep(CHECK_EVERY_S)  # an interval between checks: there is no event to wait for
        try:
            check(timezone.now())
            was_failing = False
        except DatabaseError:
            pass  # /readyz and every page report it
        except Exception:
            if not was_failing:
                log.exception("the watchdog cannot check whether alert rules are evaluated; it tries again")
            was_failing = True
        finally:
            connection.close()
