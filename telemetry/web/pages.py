"""The columns that tables sort by.

Whether reading the fleet stopped: a figure that is shown as now has to be of now.

What the pages of figures share: the charts of a subject, what fires there, what happened.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.conf import settings
from django.http import HttpRequest
from django.views.decorators.cache import cache_control
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import conditional_page, require_GET

from telemetry.metrics.windows import FleetTiles
from telemetry.models import Alert, AlertState
from telemetry.services.alerts.alerts import open_alerts
from telemetry.services.figures.groups import share_within
from telemetry.services.figures.overview import Kind
from telemetry.services.figures.replicas import events_of
from telemetry.services.self_monitoring import refused_since
from telemetry.web.charts import CHARTS, OBJECTIVE, Chart, View
from telemetry.web.ranges import PRESETS, Asked

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
    "plain_p95_s",
    "requests_per_s",
    "prompt_tokens_per_s",
    "failed_ratio",
)


LATE_INTERVALS = 3  # scrapes that may be missed before a page says that reading stopped


def reading_stopped(tiles: FleetTiles, now: datetime) -> str:
    """``late`` when the newest reading is too old to be called now, ``never`` before the first one, else nothing."""
    if not tiles.replicas_total:
        return ""
    return silence_of(tiles.read_at, now)


def silence_of(read_at: datetime | None, now: datetime) -> str:
    """The same by the newest reading's time."""
    if read_at is None:
        return "never"
    allowed_s = LATE_INTERVALS * settings.SCRAPE_INTERVAL_S + 1
    return "late" if (now - read_at).total_seconds() > allowed_s else ""


EVENTS = 8  # on a page; the rest is a link away


@dataclass(frozen=True, slots=True)
class Entry:
    """A chart on a page: its view, and those to choose from."""

    chart: Chart
    view: View
    views: list[View]


def chart_entries(state: Asked) -> list[Entry]:
    """The charts that there are of a subject, each as the URL wants it."""
    found = ((chart, chart.view(state.query, state.kind)) for chart in CHARTS.values())
    return [Entry(chart, view, chart.views_of(state.kind)) for chart, view in found if view is not None]


def frame(request: HttpRequest, state: Asked) -> dict[str, Any]:
    """What a whole page has beside its live part."""
    kept = [(key, value) for key, value in request.GET.items() if key not in {"range", "from", "to", "zoom"}]
    return {"asked": state, "presets": PRESETS, "kept": kept, "charts": chart_entries(state)}


def around(state: Asked) -> dict[str, Any]:
    """What every live part has: the share in time, what happened, what fires. At most 6 queries."""
    objective_s = float(view.key) if (view := OBJECTIVE.view(state.query, state.kind)) else 0.0
    return {
        "asked": state,
        "objective_s": objective_s,
        "in_time": share_within(state.subject, state.range.now, objective_s),
        "events": events_of(state.subject, state.range.window, EVENTS)[::-1],
        "firing": firing(state),
        "refused_since": refused_since,  # asked by a template that says why nothing was read, and by no other
    }


def firing(state: Asked) -> list[Alert]:
    """What fires of a subject: its own alerts and those of its whole pool; of the fleet none, because every page counts
    those. One query.
    """
    subject = state.subject
    if subject.pool is None:
        return []
    own = {"group": subject.group or "", "replica": subject.replica.name if subject.replica else ""}
    found = open_alerts(subject.pool).filter(state=AlertState.FIRING)
    return [alert for alert in found if subject.kind is Kind.POOL or _concerns(alert, own)]


def _concerns(alert: Alert, own: dict[str, str]) -> bool:
    """Whether what an alert names, of a group and a replica, is nothing else than these."""
    return all(alert.labels.get(name, "") in {"", value} for name, value in own.items())


def live_part(view: Any) -> Any:
    """A view that answers a page's live part: compressed (it holds no secret that its length could tell), and 304
    while nothing changed.
    """
    return require_GET(gzip_page(cache_control(private=True, no_cache=True)(conditional_page(view))))
