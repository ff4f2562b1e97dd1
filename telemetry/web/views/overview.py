"""The overview: what is my hit rate, TTFT and KV usage, now and over time, and how far from what could be reached?"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.utils import timezone
from django.views.decorators.cache import cache_control
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import conditional_page, require_GET

from controlplane.web.sorting import asked_sort
from telemetry.metrics.windows import FleetTiles
from telemetry.services.overview import fleet_tiles, group_rows, replica_rows
from telemetry.services.timeline import events_between
from telemetry.web.asking import Asked, asked
from telemetry.web.charts import CHARTS
from telemetry.web.ranges import PRESETS

REPLICA_COLUMNS = (
    "name",
    "pool",
    "health",
    "hit_rate_ratio",
    "ttft_p50_s",
    "ttft_p95_s",
    "running",
    "waiting",
    "kv_usage_ratio",
    "requests_per_s",
    "prompt_tokens_per_s",
)
GROUP_COLUMNS = (
    "name",
    "pool",
    "hit_rate_ratio",
    "ttft_p50_s",
    "ttft_p95_s",
    "requests_per_s",
    "prompt_tokens_per_s",
    "failed_ratio",
)
EVENTS = 8
LATE_INTERVALS = 3  # scrapes that may be missed before a page says that reading stopped


@require_GET
def overview(request: HttpRequest) -> HttpResponse:
    """The whole page; its charts ask for their figures themselves."""
    state = asked(request)
    charts = [{"chart": chart, "view": chart.view(request.GET)} for chart in CHARTS.values()]
    context = {"asked": state, "presets": PRESETS, "charts": charts, **_live(request, state)}
    return render(request, "telemetry/overview.html", context)


@require_GET
@gzip_page  # holds no secret that its length could tell
@cache_control(private=True, no_cache=True)
@conditional_page
def overview_live(request: HttpRequest) -> HttpResponse:
    """Tiles, tables and events, asked for again every few seconds; 304 while nothing changed."""
    return render(request, "telemetry/overview_live.html", _live(request, asked(request)))


def _live(request: HttpRequest, state: Asked) -> dict[str, Any]:
    """Everything that changes by itself. A fixed number of queries, whatever the fleet's size."""
    tiles = fleet_tiles(state.among, state.range.now)
    replica_sort = asked_sort(request, REPLICA_COLUMNS)
    group_sort = asked_sort(request, GROUP_COLUMNS, param="gsort")
    return {
        "asked": state,
        "tiles": tiles,
        "silence": reading_stopped(tiles, timezone.now()) if state.range.live else "",
        "replicas": replica_sort.apply(replica_rows(state.among, state.range.table)),
        "replica_sort": replica_sort,
        "groups": group_sort.apply(group_rows(state.among, state.range.table)),
        "group_sort": group_sort,
        "events": events_between(state.among, state.range.window)[: -EVENTS - 1 : -1],
    }


def reading_stopped(tiles: FleetTiles, now: datetime) -> str:
    """``late`` when the newest reading is too old to be called now, ``never`` before the first one, else nothing."""
    if not tiles.replicas_total:
        return ""
    if tiles.read_at is None:
        return "never"
    allowed_s = LATE_INTERVALS * settings.SCRAPE_INTERVAL_S + 1
    return "late" if (now - tiles.read_at).total_seconds() > allowed_s else ""
