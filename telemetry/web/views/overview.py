"""The pages of the fleet (overview), a pool, a task group and a replica."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import urlencode

from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.http import require_GET

from controlplane.models import Event, Pool, Replica, TaskGroup
from controlplane.web.base import render_live, requested_sort
from telemetry.services.alerts.alerts import alerts
from telemetry.services.figures.engine import last_day_of, reconcile
from telemetry.services.figures.groups import active_revisions, group_tiles, has_requests, replica_shares
from telemetry.services.figures.kv_streams import kv_streams_of
from telemetry.services.figures.overview import Subject, fleet_tiles, group_rows, replica_rows, with_ttft
from telemetry.services.figures.replicas import heat_strips, rank_rows, scraping_of
from telemetry.services.figures.semantic_cache import semantic_cache_of
from telemetry.services.lab.costs import has_response_cache, response_cache_figures
from telemetry.services.lab.decisions import MIN_PROMPTS, lint_prompts
from telemetry.services.lab.scaling import scaling_of
from telemetry.storage.dimension_sums import usage_reports
from telemetry.web.breakdown_figures import draw_precision
from telemetry.web.pages import GROUP_COLUMNS, frame, live_context, live_part, replica_table, scrape_gap
from telemetry.web.ranges import NO_GROUP, PageState, page_state, page_state_of, replica_named

# What the page of a removed replica shows.
BEFORE_REMOVAL, AFTER_REMOVAL = timedelta(hours=1), timedelta(minutes=1)
MAX_ALERTS = 5


def _tables(request: HttpRequest, state: PageState) -> dict[str, Any]:
    """The live part of the fleet's and a pool's page. Its size and queries do not depend on the fleet's size."""
    subject = state.subject
    tiles = fleet_tiles(subject.pools, state.range.now)
    group_sort = requested_sort(request, GROUP_COLUMNS, param="gsort")
    replicas = subject.replicas()
    rows = replica_rows(replicas, state.range.table)
    table = replica_table(request, rows, lambda listed: with_ttft(listed, replicas, state.range.table))
    shown = {row.name for row in table.page}
    has_cache = has_response_cache(subject.pools)
    return {
        **live_context(state),
        "tiles": tiles,
        "cache": response_cache_figures(subject.pools, state.range.table) if has_cache else None,
        "read_at": tiles.read_at,
        "scrape_gap": scrape_gap(tiles.read_at) if state.range.live and tiles.replicas_total else "",
        "replicas": table,
        "not_up": [row for row in rows if row.health in {"down", "stale"}],
        "strips": heat_strips([replica for replica in replicas if replica.name in shown], state.range.window),
        "groups": group_sort.apply(group_rows(subject.pools, state.range.table)),
        "group_sort": group_sort,
    }


@require_GET
def overview(request: HttpRequest) -> HttpResponse:
    """The overview. ``?pool=`` redirects to the pool's page."""
    state = page_state(request)
    if state.subject.pool is not None:
        query = request.GET.copy()
        query.pop("pool", None)
        return redirect(f"{reverse('telemetry:pool', args=[state.subject.pool.name])}?{query.urlencode()}")
    return render_live(request, "telemetry/overview.html", _fleet(request, state) | frame(state), partial=False)


@live_part
def overview_live(request: HttpRequest) -> HttpResponse:
    """The overview without its charts, for a refresh."""
    return render_live(request, "telemetry/overview.html", _fleet(request, page_state(request)), partial=True)


def _fleet(request: HttpRequest, state: PageState) -> dict[str, Any]:
    return _tables(request, state)


@require_GET
def pool_detail(request: HttpRequest, pool_name: str) -> HttpResponse:
    """A pool's page."""
    state, pool = _pool_state(request, pool_name)
    reconciled = reconcile([pool], last_day_of(state.range.table))
    context = {**_pool(request, state, pool), **frame(state), "reconciled": reconciled}
    return render_live(request, "telemetry/pool.html", context, partial=False)


@live_part
def pool_live(request: HttpRequest, pool_name: str) -> HttpResponse:
    """A pool's page without its charts, for a refresh."""
    return render_live(request, "telemetry/pool.html", _pool(request, *_pool_state(request, pool_name)), partial=True)


def _pool_state(request: HttpRequest, pool_name: str) -> tuple[PageState, Pool]:
    pool = get_object_or_404(Pool, name=pool_name)
    return page_state_of(request, Subject.of_pool(pool)), pool


def _pool(request: HttpRequest, state: PageState, pool: Pool) -> dict[str, Any]:
    scaling = scaling_of([pool], timezone.now())[0]
    return {
        **_tables(request, state),
        "pool": pool,
        "revisions": active_revisions(None, pool.pk),
        "scaling": scaling,
    }


@require_GET
def group_detail(request: HttpRequest, pool_name: str, group_name: str) -> HttpResponse:
    """A task group's page."""
    state, pool, group = _group_state(request, pool_name, group_name)
    prompts = lint_prompts([pool.name], timezone.now(), group=state.subject.group)
    lint = {"prompts": next(iter(prompts), None), "min_prompts": MIN_PROMPTS}
    context = {**_group(state, pool, group), **frame(state), **lint}
    return render_live(request, "telemetry/group.html", context, partial=False)


@live_part
def group_live(request: HttpRequest, pool_name: str, group_name: str) -> HttpResponse:
    """A task group's page without its charts, for a refresh."""
    return render_live(
        request, "telemetry/group.html", _group(*_group_state(request, pool_name, group_name)), partial=True
    )


def _group_state(request: HttpRequest, pool_name: str, group_name: str) -> tuple[PageState, Pool, TaskGroup | None]:
    """The group is None for requests without a group, and for a removed group with measurements."""
    pool = get_object_or_404(Pool, name=pool_name)
    if group_name == NO_GROUP:
        return page_state_of(request, Subject.of_pool(pool, "")), pool, None
    group = pool.groups.filter(name=group_name).first()
    state = page_state_of(request, Subject.of_pool(pool, group_name))
    if group is None and not has_requests(state.subject, state.range.window):
        raise Http404(f"Pool {pool.name} has no task group {group_name!r}.")
    return state, pool, group


def _group(state: PageState, pool: Pool, group: TaskGroup | None) -> dict[str, Any]:
    cache = response_cache_figures([pool], state.range.table, group=state.subject.group)
    has_cache = bool(cache.hits or cache.misses or (group and group.response_cache))
    return {
        "cache": cache if has_cache else None,
        **live_context(state),
        "pool": pool,
        "group": group,
        "rules": group.alert_rules.order_by("name") if group else (),
        "tiles": group_tiles(state.subject, state.range.now),
        "shares": replica_shares(state.subject, state.range.table),
        "revisions": active_revisions(group, pool.pk),
        "semantic": (semantic := semantic_cache_of(group, pool.name)),
        "sketch": None if semantic is None else draw_precision(semantic),
    }


@require_GET
def replica_detail(request: HttpRequest, replica_name: str) -> HttpResponse:
    """A replica's page. That of a removed replica shows the hour before its removal by default."""
    state, replica, removal = _replica_state(request, replica_name)
    if removal is not None and not {"range", "from", "to"} & set(request.GET):
        times = {"from": removal.at - BEFORE_REMOVAL, "to": removal.at + AFTER_REMOVAL}
        query = urlencode({name: f"{at:%Y-%m-%dT%H:%M:%S}" for name, at in times.items()})
        return redirect(f"{reverse('telemetry:replica', args=[replica_name])}?{query}")
    reconciled = reconcile([replica.pool], last_day_of(state.range.table), only=replica)
    context = {**_replica(state, replica, removal), **frame(state), "reconciled": reconciled}
    return render_live(request, "telemetry/replica.html", context, partial=False)


@live_part
def replica_live(request: HttpRequest, replica_name: str) -> HttpResponse:
    """A replica's page without its charts, for a refresh."""
    context = _replica(*_replica_state(request, replica_name))
    return render_live(request, "telemetry/replica.html", context, partial=True)


def _replica_state(request: HttpRequest, replica_name: str) -> tuple[PageState, Replica, Event | None]:
    replica, removal = replica_named(request, replica_name)
    if replica is None:
        raise Http404(f"No pool has had a replica {replica_name!r}.")
    return page_state_of(request, Subject.of_replica(replica)), replica, removal


def _replica(state: PageState, replica: Replica, removal: Event | None) -> dict[str, Any]:
    scraping = scraping_of(replica)
    return {
        **live_context(state),
        "replica": replica,
        "removal": removal,
        "past_alerts": alerts(replica.pool).filter(subject=replica.name)[:MAX_ALERTS] if removal else (),
        "row": with_ttft(replica_rows([replica], state.range.now), [replica], state.range.now)[0],
        "usage": usage_reports(replica.pool.name, replica.name, last_day_of(state.range.table)),
        "scraping": scraping,
        "read_at": scraping.read_at,
        "scrape_gap": scrape_gap(scraping.read_at) if state.range.live and replica.state != "disabled" else "",
        "ranks": rank_rows(replica, state.range.table),
        "strip": heat_strips([replica], state.range.window)[replica.name],
        "kv_streams": kv_streams_of(replica),
    }
