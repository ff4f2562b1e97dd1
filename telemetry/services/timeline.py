"""Events to draw on charts."""

from controlplane.models import Event
from controlplane.services.events import OBSERVED
from telemetry.metrics.windows import Window
from telemetry.services.overview import Pools

LIMIT = 500  # a chart cannot show more


def events_between(pools: Pools, window: Window) -> list[Event]:
    """All events in a window, or those of some pools and what was observed of routers; ascending. One query.

    The newest ``LIMIT`` of them.
    """
    events = Event.objects.filter(at__gt=window.start, at__lte=window.end).select_related("pool", "replica", "router")
    if pools is not None:
        events = events.filter(pool__in=pools) | events.filter(pool=None, kind__in=OBSERVED)
    return list(events.order_by("-at", "-pk")[:LIMIT])[::-1]
