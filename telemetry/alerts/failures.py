"""Loads what routers reported of failures: failed requests of task groups, and ejections of replicas."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from django.db.models import Q

from controlplane.models import Event, EventKind
from telemetry.alerts.past import Ejection, FailureStep
from telemetry.metrics.windows import Window
from telemetry.storage.sums import RouterSums

Failures = dict[str | None, list[FailureStep | None]]  # by task group; None: of the whole pool
OLDEST = timedelta(days=2)  # before the window: an ejection that began earlier is not found
# A router that started anew has ejected nothing; of a lost one nobody knows, and it serves nobody.
ENDS_ALL = (EventKind.ROUTER_STARTED, EventKind.ROUTER_LOST)


def failures_of(rows: Iterable[RouterSums], places: Mapping[datetime, int]) -> dict[str, Failures]:
    """Failed requests by pool and task group, in the order of the steps."""
    found: dict[str, Failures] = defaultdict(lambda: defaultdict(lambda: [None] * len(places)))
    for row in rows:
        if row.requests is None:
            continue
        for group in (row.group, None):
            steps, place = found[row.pool][group], places[row.start]
            known = steps[place] or FailureStep(0, 0)
            steps[place] = FailureStep(known.requests + row.requests, known.failed + (row.failed or 0))
    return dict(found)


def ejections_of(replica_ids: Sequence[int], window: Window) -> dict[int, list[Ejection]]:
    """Ejections of replicas by any router that reach into a window, by replica id, ascending. One query."""
    of_replicas = Q(kind__in=(EventKind.REPLICA_EJECTED, EventKind.REPLICA_READMITTED), replica_id__in=replica_ids)
    events = Event.objects.filter(
        of_replicas | Q(kind__in=ENDS_ALL),
        router__isnull=False,
        at__gt=window.start - OLDEST,
        at__lte=window.end,
        kind__in=(EventKind.REPLICA_EJECTED, EventKind.REPLICA_READMITTED, *ENDS_ALL),
    ).order_by("at", "pk")
    found: dict[int, list[Ejection]] = defaultdict(list)
    going: dict[tuple[int, int], Ejection] = {}  # by replica and router
    rows = events.values_list("kind", "replica_id", "router_id", "router__name", "at", "detail__reason")
    for kind, replica_id, router_id, router, at, reason in rows:
        if kind == EventKind.REPLICA_EJECTED:
            going.setdefault((replica_id, router_id), Ejection(router, at, None, reason or ""))
            continue
        ended = [key for key in going if key[1] == router_id and (kind in ENDS_ALL or key[0] == replica_id)]
        for key in ended:
            began = going.pop(key)
            found[key[0]].append(Ejection(began.router, began.start, at, began.reason))
    for (replica_id, _), began in going.items():
        found[replica_id].append(began)
    return {pk: sorted(ejections, key=lambda one: one.start) for pk, ejections in found.items()}
