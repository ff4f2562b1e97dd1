"""The overview: what is my hit rate, TTFT and KV usage, now and over time, and how far from the reachable share?

A pool: its hit rate and how far that is from what could be, who serves it, and what happened there.

A task group: hit rate, reachable share, objective, where its requests go, and which policy sends them.

A replica: how warm it is, what its engine says of itself, and how reading it goes.
"""

from __future__ import annotations

from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET

from controlplane.models import Pool, Replica, TaskGroup
from controlplane.web.tables import asked_sort
from telemetry.metrics.windows import ReplicaRow
from telemetry.services.figures.engine import newest_part, reconcile
from telemetry.services.figures.groups import active_revisions, group_tiles, has_requests, replica_shares
from telemetry.services.figures.overview import Subject, fleet_tiles, group_rows, replica_rows
from telemetry.services.figures.replicas import heat_strips, rank_rows, scraping_of
from telemetry.services.lab.decisions import MIN_PROMPTS, lint_prompts
from telemetry.services.notifications.channels import notified_by
from telemetry.storage.dimension_sums import usage_reports
from telemetry.web.pages import GROUP_COLUMNS, REPLICA_COLUMNS, around, frame, live_part, reading_stopped, silence_of
from telemetry.web.ranges import NO_GROUP, Asked, asked, asked_about


@require_GET
def overview(request: HttpRequest) -> HttpResponse:
    """The whole page; its charts ask for their figures themselves. A pool that is asked for has a page of its own."""
    state = asked(request)
    if state.subject.pool is not None:
        query = request.GET.copy()
        query.pop("pool", None)
        return redirect(f"{reverse('telemetry:pool', args=[state.subject.pool.name])}?{query.urlencode()}")
    return render(request, "telemetry/overview.html", {**_live(request, state), **frame(request, state)})


@live_part
def overview_live(request: HttpRequest) -> HttpResponse:
    """Tiles, tables and events, asked for again every few seconds; 304 while nothing changed."""
    return render(request, "telemetry/overview_live.html", _live(request, asked(request)))


def _live(request: HttpRequest, state: Asked) -> dict[str, Any]:
    """Everything that changes by itself. A fixed number of queries, whatever the fleet's size."""
    subject = state.subject
    tiles = fleet_tiles(subject.among, state.range.now)
    replica_sort = asked_sort(request, REPLICA_COLUMNS)
    group_sort = asked_sort(request, GROUP_COLUMNS, param="gsort")
    return {
        **around(state),
        "notified_by": notified_by(),
        "tiles": tiles,
        "silence": reading_stopped(tiles, timezone.now()) if state.range.live else "",
        "replicas": replica_sort.apply(replica_rows(subject.among, state.range.table)),
        "strips": heat_strips(subject.replicas(), state.range.window),
        "replica_sort": replica_sort,
        "groups": group_sort.apply(group_rows(subject.among, state.range.table)),
        "group_sort": group_sort,
    }


@require_GET
def pool_detail(request: HttpRequest, pool_name: str) -> HttpResponse:
    """The whole page; its charts ask for their figures themselves."""
    state, pool = _asked_pool(request, pool_name)
    agreement = {"reconciled": reconcile([pool], newest_part(state.range.table))}
    return render(
        request, "telemetry/pool.html", {**_live_pool(request, state, pool), **frame(request, state), **agreement}
    )


@live_part
def pool_live(request: HttpRequest, pool_name: str) -> HttpResponse:
    """What changes by itself."""
    return render(request, "telemetry/pool_live.html", _live_pool(request, *_asked_pool(request, pool_name)))


def _asked_pool(request: HttpRequest, pool_name: str) -> tuple[Asked, Pool]:
    pool = get_object_or_404(Pool, name=pool_name)
    return asked_about(request, Subject.of_pool(pool)), pool


def _live_pool(request: HttpRequest, state: Asked, pool: Pool) -> dict[str, Any]:
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
        "revisions": active_revisions(None, pool.pk),
    }


@require_GET
def group_detail(request: HttpRequest, pool_name: str, group_name: str) -> HttpResponse:
    """The whole page; its charts ask for their figures themselves."""
    state, pool, group = _asked_group(request, pool_name, group_name)
    found = lint_prompts([pool.name], timezone.now(), group=state.subject.group)
    described = {"prompts": next(iter(found), None), "few": MIN_PROMPTS}
    return render(
        request, "telemetry/group.html", {**_live_group(state, pool, group), **frame(request, state), **described}
    )


@live_part
def group_live(request: HttpRequest, pool_name: str, group_name: str) -> HttpResponse:
    """What changes by itself."""
    return render(request, "telemetry/group_live.html", _live_group(*_asked_group(request, pool_name, group_name)))


def _asked_group(request: HttpRequest, pool_name: str, group_name: str) -> tuple[Asked, Pool, TaskGroup | None]:
    """The page's state, its pool and its group; None for the requests of none, and for a removed one."""
    pool = get_object_or_404(Pool, name=pool_name)
    if group_name == NO_GROUP:
        return asked_about(request, Subject.of_pool(pool, "")), pool, None
    group = pool.groups.filter(name=group_name).first()
    state = asked_about(request, Subject.of_pool(pool, group_name))
    if group is None and not has_requests(state.subject, state.range.window):
        raise Http404(f"Pool {pool.name} has no task group {group_name!r}.")
    return state, pool, group


def _live_group(state: Asked, pool: Pool, group: TaskGroup | None) -> dict[str, Any]:
    """A fixed number of queries, however many replicas serve it."""
    return {
        **around(state),
        "pool": pool,
        "group": group,
        "tiles": group_tiles(state.subject, state.range.now),
        "shares": replica_shares(state.subject, state.range.table),
        "revisions": active_revisions(group, pool.pk),
    }


@require_GET
def replica_detail(request: HttpRequest, replica_name: str) -> HttpResponse:
    """The whole page; its charts ask for their figures themselves."""
    state, replica = _asked_replica(request, replica_name)
    agreement = {"reconciled": reconcile([replica.pool], newest_part(state.range.table), only=replica)}
    return render(
        request, "telemetry/replica.html", {**_live_replica(state, replica), **frame(request, state), **agreement}
    )


@live_part
def replica_live(request: HttpRequest, replica_name: str) -> HttpResponse:
    """What changes by itself."""
    return render(request, "telemetry/replica_live.html", _live_replica(*_asked_replica(request, replica_name)))


def _asked_replica(request: HttpRequest, replica_name: str) -> tuple[Asked, Replica]:
    replica = get_object_or_404(Replica.objects.select_related("pool"), name=replica_name)
    return asked_about(request, Subject.of_replica(replica)), replica


def _row_of(replica: Replica, state: Asked) -> ReplicaRow:
    """The replica's line among its pool's; Http404 where it was removed since it was looked up."""
    rows = replica_rows([replica.pool], state.range.now)
    found = next((row for row in rows if row.name == replica.name), None)
    if found is None:
        raise Http404(f"Replica {replica.name} was removed.")
    return found


def _live_replica(state: Asked, replica: Replica) -> dict[str, Any]:
    """A fixed number of queries."""
    scraping = scraping_of(replica)
    return {
        **around(state),
        "replica": replica,
        "row": _row_of(replica, state),
        "usage": usage_reports(replica.pool.name, replica.name, newest_part(state.range.table)),
        "scraping": scraping,
        "silence": silence_of(scraping.read_at, timezone.now())
        if state.range.live and replica.state != "disabled"
        else "",
        "ranks": rank_rows(replica, state.range.table),
        "strip": heat_strips([replica], state.range.window)[replica.name],
    }
