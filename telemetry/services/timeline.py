"""Events to draw on charts."""

from controlplane.models import Event
from telemetry.metrics.windows import Window
from telemetry.services.overview import Pools

LIMIT = 500  # a chart cannot show more


def events_between(pools: Pools, window: Window) -> list[Event]:
    """Events of some pools and those of no pool, or all, in a window; ascending, the newest ``LIMIT``. One query."""
    events = Event.objects.filter(at__gt=window.start, at__lte=window.end).select_related("pool", "replica", "router")
    if pools is not None:
        events = events.filter(pool__in=pools) | events.filter(pool=None)
    return list(events.order_by("-at", "-pk")[:LIMIT])[::-1]
