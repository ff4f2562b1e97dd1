"""The steps of a new installation, each done or not by what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db.models import Exists, Q, QuerySet

from controlplane.models import Pool
from telemetry.models import (
    BreakdownBin,
    Channel,
    Health,
    Notification,
    NotificationKind,
    NotificationState,
    Reading,
    RouterReading,
    ScrapeState,
)

RECENT = timedelta(hours=1)  # of readings, which replays follow within minutes
DAY = timedelta(days=1)
SETUP_COOKIE = "setup"  # "off": dismissed in this browser


@dataclass(frozen=True, slots=True)
class Step:
    """One step; ``route`` is the page where it is done."""

    label: str
    how: str
    route: str
    action: str
    done: bool


_STEPS = (  # column of the query, then the fields of a step
    (
        "replica",
        "A replica that responds",
        "Add the base URL of each engine. Its metrics are read every few seconds.",
        "controlplane:fleet",
        "Add replicas",
    ),
    (
        "caching",
        "Prefix caching",
        "Done if a replica responds and none says that it runs with --no-enable-prefix-caching.",
        "controlplane:fleet",
        "Show replicas",
    ),
    (
        "request",
        "A request of a client",
        "Clients send to a router instead of to a replica: copy the lines below.",
        "telemetry:start",
        "Connect a client",
    ),
    (
        "details",
        "Cached tokens in responses",
        "Start vLLM with --enable-prompt-tokens-details: hit rates of task groups and savings need it.",
        "telemetry:requests",
        "Show requests",
    ),
    (
        "group",
        "A task group of requests",
        "By the header X-Task-Group, a client key, a session, a prefix or the model. Figures are by task group.",
        "controlplane:task-groups",
        "Task groups",
    ),
    (
        "channel",
        "A delivered notification",
        "Without a channel, alerts are shown here only and nobody is notified.",
        "telemetry:channel-new",
        "Add channel",
    ),
    (
        "price",
        "A price per GPU-hour",
        "In the settings of a pool. Savings are money then.",
        "telemetry:value",
        "Set price",
    ),
    (
        "user",
        "A second user",
        "So that more than one person can respond to an alert, and a change names who made it.",
        "controlplane:users",
        "Add user",
    ),
)


def served_model(pools: QuerySet[Pool], now: datetime) -> str | None:
    """A model of the engines of some pools that were scraped lately; None if there is none. One query."""
    readings = Reading.objects.filter(at__gt=now - RECENT, replica__pool__in=pools).exclude(model="")
    return readings.order_by("-at").values_list("model", flat=True).first()


def setup_steps(user: User, now: datetime) -> list[Step]:
    """Every step, in the order in which they are done. One query."""
    routed = RouterReading.objects.filter(at__gt=now - RECENT, pool__gt="")
    replayed = BreakdownBin.objects.filter(at__gt=now - DAY)
    replicas = ScrapeState.objects.filter(replica__isnull=False, health=Health.UP)
    tests = Notification.objects.filter(kind=NotificationKind.TEST, state=NotificationState.DELIVERED)
    columns = {
        "replica": Exists(replicas),
        "caching": Exists(replicas) & ~Exists(replicas.filter(lacks_prefix_cache=True)),
        "request": Exists(routed.filter(requests__gt=0)) | Exists(replayed.filter(requests__gt=0)),
        "details": Exists(routed.filter(usage_reported__gt=0)) | Exists(replayed.filter(reported_requests__gt=0)),
        "group": Exists(routed.filter(requests__gt=0, group__gt="")) | Exists(replayed.filter(group__gt="")),
        "channel": Exists(tests) | Exists(Channel.objects.filter(delivered_at__isnull=False)),
        "price": Exists(Pool.objects.filter(costs__isnull=False)),
        "user": Exists(User.objects.filter(is_active=True).exclude(pk=user.pk)),
    }
    found: Any = User.objects.filter(pk=user.pk).values(**{name: Q(each) for name, each in columns.items()}).get()
    return [Step(label, how, route, action, bool(found[name])) for name, label, how, route, action in _STEPS]
