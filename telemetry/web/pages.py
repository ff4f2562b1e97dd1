"""What the pages of fleet, pool, task group and replica share: charts, alerts, events, and the age of the data."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.db.models import Q
from django.http import HttpRequest
from django.utils import timezone
from django.utils.functional import SimpleLazyObject
from django.views.decorators.cache import cache_control
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import conditional_page, require_GET

from controlplane.web.base import viewable
from telemetry.models import Alert, AlertState
from telemetry.services.alerts.alerts import open_alerts
from telemetry.services.figures.groups import share_within
from telemetry.services.figures.overview import Kind
from telemetry.services.figures.replicas import events_of
from telemetry.services.self_monitoring import refused_since, telemetry_status
from telemetry.web.charts import CHARTS, OBJECTIVE, Chart, View
from telemetry.web.ranges import PRESETS, PageState

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


def telemetry_status_context(request: HttpRequest) -> dict[str, Any]:
    """Context processor: firing alerts that are not suppressed, delays of telemetry. One query if a page shows them."""
    if not (hasattr(request, "user") and request.user.is_authenticated):
        return {}
    now = timezone.now()

    def status() -> Any:
        firing = Q(state=AlertState.FIRING, suppression__isnull=True)
        return telemetry_status(viewable(request, open_alerts()).filter(firing), now)

    return {"telemetry_status": SimpleLazyObject(status)}


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


def frame(request: HttpRequest, state: PageState) -> dict[str, Any]:
    """The context of a page besides that of its live part."""
    kept = [(key, value) for key, value in request.GET.items() if key not in {"range", "from", "to", "zoom"}]
    views = ((chart, chart.view(state.query, state.kind)) for chart in CHARTS.values())
    charts = [Entry(chart, view, chart.views_of(state.kind)) for chart, view in views if view is not None]
    return {"presets": PRESETS, "kept": kept, "charts": charts}


def live_context(state: PageState) -> dict[str, Any]:
    """The context of every live part. At most six queries."""
    objective_s = float(view.key) if (view := OBJECTIVE.view(state.query, state.kind)) else 0.0
    return {
        "page_state": state,
        "objective_s": objective_s,
        "in_time": share_within(state.subject, state.range.now, objective_s),
        "events": events_of(state.subject, state.range.window, MAX_EVENTS)[::-1],
        "firing": firing_alerts(state),
        "refused_since": refused_since,  # called by the template only if scraping stopped
    }


def firing_alerts(state: PageState) -> list[Alert]:
    """The firing alerts of a subject and of its whole pool; none for the fleet, since every page counts those."""
    subject = state.subject
    if subject.pool is None:
        return []
    names = {"group": subject.group or "", "replica": subject.replica.name if subject.replica else ""}
    return [
        alert
        for alert in open_alerts(subject.pool).filter(state=AlertState.FIRING)
        if subject.kind is Kind.POOL or all(alert.labels.get(key, "") in {"", name} for key, name in names.items())
    ]


def live_part(view: Any) -> Any:
    """A view of a page's live part: compressed (it contains no secret), and 304 while nothing changed."""
    return require_GET(gzip_page(cache_control(private=True, no_cache=True)(conditional_page(view))))
