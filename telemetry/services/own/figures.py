"""What the control plane tells of itself to those who watch it: routers, lags and backlogs, in ten short queries."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count, Max, Min, Q

from controlplane.isolation import failing_items
from controlplane.models import ConfigSnapshot, Router
from controlplane.services.snapshots import newest_snapshot
from controlplane.services.worker_liveness import worker_silence_s
from telemetry.metrics.windows import Window
from telemetry.models import AlertRule, Notification, NotificationState, ScrapeState
from telemetry.services.own.lag import refused_since, scrape_lags
from telemetry.storage.reachable import SHORTEST, reachable_by_pool


@dataclass(frozen=True, slots=True)
class Figure:
    """One series."""

    name: str
    text: str
    value: float | None  # None: unknown, and left out
    labels: tuple[tuple[str, str], ...] = ()


def own_figures(now: datetime) -> list[Figure]:
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
