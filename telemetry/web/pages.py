"""What pages share: charts, alerts, events, the age of the data, and the wall.

The wall is the overview for a screen that is read from afar. What a read-only link shows of it is rendered without the
request, so that it depends on nothing of who looks: no session, role or query.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, wraps
from typing import Any

from django.conf import settings
from django.core.paginator import Page, Paginator
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse, QueryDict
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.functional import SimpleLazyObject
from django.utils.html import format_html
from django.utils.safestring import SafeString
from django.views.decorators.cache import cache_control
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import conditional_page, require_GET

from controlplane.access.actor import actor_of
from controlplane.models import Rollout, RolloutState
from controlplane.models.policy import OPEN_ROLLOUTS
from controlplane.web.base import Sort, requested_sort, viewable
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.remedies import is_over, present_remedy
from telemetry.metrics.windows import ReplicaRow
from telemetry.models import Alert, AlertState, Severity, SharedLink
from telemetry.services.alerts.alerts import open_alerts
from telemetry.services.figures.groups import policies_in_use, policy_periods, share_within
from telemetry.services.figures.overview import (
    HEALTHS,
    Fleet,
    Subject,
    before,
    change_of,
    fleet_tiles,
    replica_rows,
    worst_first,
)
from telemetry.services.figures.replicas import events_of, heat_strips
from telemetry.services.lab.value import saved_in
from telemetry.services.self_monitoring import TelemetryStatus, telemetry_status
from telemetry.web.charts import CHARTS, HIT_RATE, OBJECTIVE, TTFT, Chart, View
from telemetry.web.figures import build_figure, markers
from telemetry.web.ranges import PageState, requested_range

log = logging.getLogger(__name__)
REPLICA_COLUMNS = (
    "name", "pool", "health", "hit_rate_ratio", "ttft_p50_s", "ttft_p95_s", "running", "waiting", "kv_usage_ratio",
    "requests_per_s", "prompt_tokens_per_s",
)  # fmt: skip
GROUP_COLUMNS = (
    "name", "pool", "hit_rate_ratio", "ttft_p50_s", "ttft_p95_s", "plain_p95_s", "requests_per_s",
    "prompt_tokens_per_s", "failed_ratio",
)  # fmt: skip
MAX_MISSED_SCRAPES = 3  # before a page says that scraping stopped
MAX_EVENTS = 8  # on a page
MAX_FIRING, MAX_CANARIES = 50, 3  # of which the status strip shows the worst
REPLICAS_PER_PAGE = 50
MAIN_CHARTS = (HIT_RATE.slug, TTFT.slug)  # of the overview; each of the others has a page
MAX_STRIPS, MAX_WALL_ALERTS = 12, 3  # of a wall
FLEET_WIDE = tuple(kind.name for kind in KINDS.values() if kind.is_fleet_wide)
PAGE, LIVE = "page", "live"
SHARED_PARTS = frozenset({PAGE, LIVE, *MAIN_CHARTS})  # of what a read-only link shows
TTFT_COLUMNS = ("ttft_p50_s", "ttft_p95_s")


def telemetry_status_context(request: HttpRequest) -> dict[str, Any]:
    """Context processor: firing alerts that are not suppressed, delays of telemetry. One query if a page shows them."""
    if not (hasattr(request, "user") and request.user.is_authenticated):
        return {}
    return {"telemetry_status": SimpleLazyObject(lambda: _status(request))}


def _status(request: HttpRequest) -> TelemetryStatus:
    """The status at the first call for a request."""
    if not hasattr(request, "telemetry_status"):
        status = telemetry_status(_firing(request), timezone.now(), _canaries(request))
        request.telemetry_status = status  # type: ignore[attr-defined]
    return request.telemetry_status  # type: ignore[attr-defined, no-any-return]


def _firing(request: HttpRequest) -> QuerySet[Alert]:
    return viewable(request, open_alerts()).filter(state=AlertState.FIRING, suppression__isnull=True)


def _canaries(request: HttpRequest) -> QuerySet[Rollout]:
    started = Rollout.objects.filter(state__in=OPEN_ROLLOUTS).exclude(state=RolloutState.AWAITING_APPROVAL)
    return viewable(request, started).exclude(stages=[])


def strip_html(request: HttpRequest) -> str:
    """The status strip, or that the status is unknown: it breaks no page.

    Besides the status it costs a query if alerts fire, one if a rollout by stages is open, and that of a remedy.
    """
    try:
        status = _status(request)
        alert = min(_firing(request)[:MAX_FIRING], key=_urgency, default=None) if status.firing else None
        rollouts = _canaries(request).defer("past_readings").select_related("revision__policy").order_by("pk")
        context = {"request": request, "status": status, "alert": alert, "remedy": alert and present_remedy(alert)}
        context["canaries"] = rollouts[:MAX_CANARIES] if status.canaries else ()
        return render_to_string("components/status_strip.html", context)
    except Exception:
        log.exception("the status strip cannot be shown")
        return render_to_string("components/status_strip.html", {"request": request, "unknown": True})


def _urgency(alert: Alert) -> tuple[bool, bool, int, bool]:
    """The most urgent has the least: not acknowledged, not over, then the most severe, then one with a known cause."""
    severities = (Severity.CRITICAL, Severity.WARNING, Severity.INFO)
    severity = severities.index(Severity(alert.severity))
    return alert.acknowledged_at is not None, is_over(alert), severity, not alert.causes


def firing_count(request: HttpRequest) -> SafeString:
    """The number of firing alerts in the navigation, for a refresh."""
    count = _status(request).firing
    text = format_html('{}<span class="visually-hidden"> firing</span>', count) if count else ""
    return format_html('<span class="count" id="firing-count" hx-swap-oob="true">{}</span>', text)


def scrape_gap(read_at: datetime | None) -> str:
    """Return "late" if the newest sample is too old to be called current, "never" without a sample, else ""."""
    if read_at is None:
        return "never"
    allowed_s = MAX_MISSED_SCRAPES * settings.SCRAPE_INTERVAL_S + 1
    return "late" if (timezone.now() - read_at).total_seconds() > allowed_s else ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A chart on a page: the selected view, and all views."""

    chart: Chart
    view: View
    views: list[View]


def frame(state: PageState, drawn: Collection[str] = CHARTS) -> dict[str, Any]:
    """The context of a page besides that of its live part: the charts that are drawn, and links to the others."""
    views = ((chart, chart.view(state.query, state.kind)) for chart in CHARTS.values())
    charts = [Entry(chart, view, chart.views_of(state.kind)) for chart, view in views if view is not None]
    return {
        "charts": [entry for entry in charts if entry.chart.slug in drawn],
        "more_charts": [entry for entry in charts if entry.chart.slug not in drawn],
    }


@dataclass(frozen=True, slots=True)
class ReplicaTable:
    """One page of the table of replicas. ``find``, ``health``, ``sort`` and ``page`` are in the URL."""

    page: Page[ReplicaRow]
    total: int  # replicas without the filter
    sort: Sort  # without a column: the worst first
    find: str  # part of a name, "" for all
    health: str  # "" for all
    kept: list[tuple[str, str]]  # other parameters of the URL, for the form
    healths: Sequence[str] = HEALTHS

    @property
    def can_filter(self) -> bool:
        return self.total > REPLICAS_PER_PAGE or self.is_filtered

    @property
    def is_filtered(self) -> bool:
        return bool(self.find or self.health)


def replica_table(
    request: HttpRequest, rows: Sequence[ReplicaRow], with_ttft: Callable[[list[ReplicaRow]], list[ReplicaRow]]
) -> ReplicaTable:
    """The page of rows, which are sorted by name, that a URL asks for; the worst first if there are several pages.

    TTFT is queried for the rows of the page alone, unless they are sorted by it.
    """
    find, health = request.GET.get("find", "").strip(), request.GET.get("health", "")
    health = health if health in HEALTHS else ""
    found = [row for row in rows if find.lower() in row.name.lower() and health in {"", row.health}]
    sort = requested_sort(request, REPLICA_COLUMNS)
    if request.GET.get("sort", "").removeprefix("-") not in REPLICA_COLUMNS and len(found) > REPLICAS_PER_PAGE:
        sort, found = Sort(""), worst_first(found)
    else:
        found = sort.apply(with_ttft(found) if sort.key in TTFT_COLUMNS else found)
    kept = [(key, str(value)) for key, value in request.GET.items() if key not in {"find", "health", "page"}]
    page = Paginator(found, REPLICAS_PER_PAGE).get_page(request.GET.get("page"))
    if sort.key not in TTFT_COLUMNS:
        page.object_list = with_ttft(list(page.object_list))
    return ReplicaTable(page, len(rows), sort, find, health, kept)


def live_context(state: PageState) -> dict[str, Any]:
    """The context of every live part. One query, and two at most where ``in_time`` is shown."""
    objective_s = float(view.key) if (view := OBJECTIVE.view(state.query, state.kind)) else 0.0
    return {
        "page_state": state,
        "in_time": cache(lambda: share_within(state.subject, state.range.window, objective_s)),
        "events": events_of(state.subject, state.range.window, MAX_EVENTS)[::-1],
    }


Content = tuple[bytes, str, int]  # with its type and the response's status


class SharedContent:
    """Content that many tabs request every few seconds: computed once for all of them, and kept for ``fresh_s``.

    The first request of a key computes; requests that arrive meanwhile wait for it. If it fails or takes longer than
    ``max_wait_s``, each of them computes its own.
    """

    def __init__(self, *, max_items: int = 64, max_wait_s: float = 10.0) -> None:
        self._max_items, self._max_wait_s = max_items, max_wait_s
        self._lock = threading.Lock()
        self._items: dict[Hashable, tuple[float, Future[Content]]] = {}  # (fresh until, content)

    def get(self, key: Hashable, compute: Callable[[], Content], fresh_s: float) -> Content:
        """The content of a key; exceptions of ``compute`` are the caller's own."""
        with self._lock:
            now = time.monotonic()
            self._items = {it: item for it, item in self._items.items() if item[0] > now}
            future = self._items[key][1] if key in self._items else None
            own: Future[Content] = Future()
            if future is None and len(self._items) < self._max_items:
                self._items[key] = math.inf, own
        if future is not None:
            with suppress(Exception):
                return future.result(self._max_wait_s)
            return compute()
        try:
            own.set_result(compute())
        except BaseException as error:
            own.set_exception(error)
            raise
        finally:
            self._keep(key, own, fresh_s)
        return own.result()

    def _keep(self, key: Hashable, own: Future[Content], fresh_s: float) -> None:
        with self._lock:
            if self._items.get(key, (0.0, None))[1] is own:
                self._items[key] = (0.0 if own.exception() else time.monotonic() + fresh_s), own


_live_parts = SharedContent()


def live_part(view: Callable[..., HttpResponse]) -> Any:
    """A view of a page's live part: computed once for all who may see the same, compressed, 304 while nothing changed.

    It contains no secret and nothing of its reader except what the reader's roles allow to see.
    """

    @wraps(view)
    def shared(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        def compute() -> Content:
            response = view(request, *args, **kwargs)
            return response.content, response["Content-Type"], response.status_code

        key = frozenset(actor_of(request).roles.items()), request.get_full_path()
        content, content_type, status = _live_parts.get(key, compute, settings.LIVE_PARTS_FRESH_S)
        return HttpResponse(content, content_type=content_type, status=status)

    return require_GET(gzip_page(cache_control(private=True, no_cache=True)(conditional_page(shared))))


def wall_context(state: PageState) -> dict[str, Any]:
    """What a wall shows of its subject. The number of its queries does not depend on that of replicas."""
    pools = state.pools if state.subject.pool is None else [state.subject.pool]
    window, now = state.range.tiles, timezone.now()
    period = before(window)
    fleet = Fleet(state.subject, period.start)
    rows = worst_first(replica_rows(fleet, state.range.table))
    shown = {row.name for row in rows[:MAX_STRIPS]}
    tiles = fleet_tiles(fleet, window)
    return {
        **frame(state, MAIN_CHARTS),
        "wall": True,
        "page_state": state,
        "pool": state.subject.pool,
        "tiles": tiles,
        "read_at": tiles.read_at,
        "scrape_gap": scrape_gap(tiles.read_at) if state.range.live and tiles.replicas_total else "",
        "change": change_of(tiles, fleet, period),
        "saved": saved_in(fleet, pools, window, now),
        "policies": policies_in_use(pools),
        "rows": [row for row in rows if row.name in shown],
        "more_replicas": len(rows) - len(shown),
        "strips": heat_strips([replica for replica in fleet.replicas if replica.name in shown], window),
    }


def shared_content(link: SharedLink, part: str) -> Content:
    """One of the ``SHARED_PARTS`` of what a link shows."""
    query = QueryDict(link.query)
    state = PageState([link.pool], Subject.of_pool(link.pool), requested_range(query), query)
    if part in MAIN_CHARTS:
        return json.dumps(_shared_figure(link, state, part)).encode(), "application/json", 200
    # Alerts that are fleet-wide name routers, and what routers say of a configuration of all pools.
    firing = open_alerts(link.pool).filter(state=AlertState.FIRING, suppression__isnull=True)
    worst = sorted(firing.exclude(rule__kind__in=FLEET_WIDE)[:MAX_FIRING], key=_urgency)
    context = wall_context(state) | {"shared": True, "firing": worst[:MAX_WALL_ALERTS]}
    context["layout"] = "base.html" if part == PAGE else "partial.html"
    return render_to_string("telemetry/overview.html", context).encode(), "text/html; charset=utf-8", 200


def _shared_figure(link: SharedLink, state: PageState, slug: str) -> dict[str, Any]:
    """The marks have labels and no sentences, because those name users."""
    view, window = CHARTS[slug].view(state.query, state.kind), state.range.window
    if view is None:
        raise LookupError(slug)
    events = [event for event in events_of(state.subject, window) if event.pool_id == link.pool_id]
    marks = [replace(mark, lines=[]) for mark in markers(events, window, named=False)]
    periods = policy_periods(link.pool, None, window)
    return build_figure(view, view.figure.query(state.subject, window), marks, window, periods=periods)
