"""Events to draw on charts."""

from controlplane.models import Event, Pool
from telemetry.metrics.windows import Window

LIMIT = 500  # a chart cannot show more


def events_between(pool: Pool | None, window: Window) -> list[Event]:
    """Events of a pool and those of no pool, or all, in a window; ascending, the newest ``LIMIT``. One query."""
    events = Event.objects.filter(at__gt=window.start, at__lte=window.end).select_related("pool", "replica", "router")
    if pool is not None:
        events = events.filter(pool=pool) | events.filter(pool=None)
    return list(events.order_by("-at", "-pk")[:LIMIT])[::-1]
