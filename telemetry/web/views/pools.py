"""A pool: its hit rate and how far that is from what could be, who serves it, and what happened there."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_GET

from controlplane.models import Pool
from controlplane.web.sorting import asked_sort
from telemetry.services.figures.groups import revisions_in_force
from telemetry.services.figures.heat import heat_strips
from telemetry.services.figures.overview import fleet_tiles, group_rows, replica_rows
from telemetry.services.figures.reconciliation import newest_part, reconcile
from telemetry.services.figures.subjects import Subject
from telemetry.web.asking import Asked, asked_about
from telemetry.web.pages import around, frame, live_part
from telemetry.web.silence import reading_stopped
from telemetry.web.tables import GROUP_COLUMNS, REPLICA_COLUMNS


@require_GET
def pool_detail(request: HttpRequest, pool_name: str) -> HttpResponse:
    """The whole page; its charts ask for their figures themselves."""
    state, pool = _asked(request, pool_name)
    agreement = {"reconciled": reconcile([pool], newest_part(state.range.table))}
    return render(request, "telemetry/pool.html", {**_live(request, state, pool), **frame(request, state), **agreement})


@live_part
def pool_live(request: HttpRequest, pool_name: str) -> HttpResponse:
    """What changes by itself."""
    return render(request, "telemetry/pool_live.html", _live(request, *_asked(request, pool_name)))


def _asked(request: HttpRequest, pool_name: str) -> tuple[Asked, Pool]:
    pool = get_object_or_404(Pool, name=pool_name)
    return asked_about(request, Subject.of_pool(pool)), pool


def _live(request: HttpRequest, state: Asked, pool: Pool) -> dict[str, Any]:
    """A fixed number of queries, whatever the pool's size."""
    subject = state.subject
    tiles = fleet_tiles(subject.among, state.range.now)
    replica_sort = asked_sort(request, REPLICA_COLUMNS)
    group_sort = asked_sort(request, GROUP_COLUMNS, param="gsort")
    return {
        **around(state),
        "pool": pool,
        "tiles": tiles,
        "silence": reading_stopped(tiles, timezone.now()) if state.range.live else "",
        "replicas": replica_sort.apply(replica_rows(subject.among, state.range.table)),
        "strips": heat_strips(subject.replicas(), state.range.window),
        "replica_sort": replica_sort,
        "groups": group_sort.apply(group_rows(subject.among, state.range.table)),
        "group_sort": group_sort,
        "revisions": revisions_in_force(None, pool.pk),
    }
