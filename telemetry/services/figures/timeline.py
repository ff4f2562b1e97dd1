"""Events to draw on charts, and the times at which a cache was cold."""

from __future__ import annotations

from datetime import datetime

from django.db.models import Q

from controlplane.models import Event
from controlplane.services.events import OBSERVED
from telemetry.metrics.windows import Window
from telemetry.services.figures.subjects import Kind, Subject
from telemetry.storage.cold import cold_bands

LIMIT = 500  # a chart cannot show more


def events_of(subject: Subject, window: Window, limit: int = LIMIT) -> list[Event]:
    """The newest events of a window that concern a subject, ascending. One query.

    Of a pool: its own and what was observed of routers. Of a replica: its own and those of its pool that name none.
    Of a task group: those of its pool, because the policies and replicas that serve it are there.
    """
    events = Event.objects.filter(at__gt=window.start, at__lte=window.end).select_related("pool", "replica", "router")
    if subject.among is not None:
        concerns = Q(pool__in=subject.among) | Q(pool=None, kind__in=OBSERVED)
        if subject.kind is Kind.REPLICA:
            concerns &= Q(replica=subject.replica) | Q(replica=None)
        events = events.filter(concerns)
    return list(events.order_by("-at", "-pk")[:limit])[::-1]


def cold_stretches(subject: Subject, window: Window) -> list[tuple[datetime, datetime]]:
    """When a replica's cache was filling anew after a restart (H18), ascending; of other subjects [], without a query.

    A part of a fleet that is cold is no reason to call the whole so.
    """
    if subject.replica is None:
        return []
    return [(band.start, band.end) for band in cold_bands([subject.replica.pk], window)]
