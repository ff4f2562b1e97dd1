"""The report page: a pool before and after a time or a rollout, for the screen and for paper."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, render
from django.utils import timezone
from django.views.decorators.http import require_GET

from controlplane.errors import InvalidError
from controlplane.models import Event, Pool, Rollout
from controlplane.web.base import int_parameter, viewable
from telemetry.services.lab.reports import Comparison, Report, report_of, report_windows
from telemetry.web.ranges import length_s
from telemetry.web.tags import report_change

SPANS = {"1h": "1 hour", "6h": "6 hours", "24h": "24 hours", "7d": "7 days"}
DEFAULT = "24h"
# Figure, label, filter of a value, whether less is better (None: neither).
FIGURES: tuple[tuple[str, str, str, bool | None], ...] = (
    ("requests", "Requests", "count", None),
    ("hit_rate", "Hit rate", "percent", False),
    ("reachable", "Reachable", "percent", None),
    ("ttft_p50_s", "TTFT p50", "seconds", True),
    ("ttft_p95_s", "TTFT p95", "seconds", True),
    ("prefill_s_per_day", "Prefill a day", "hours", True),
    ("money_per_day", "Cost of prefill a day", "money", True),
    ("load_max_over_mean", "Busiest replica / mean", "number", True),
    ("failed_ratio", "Failed requests", "percent", True),
)
GROUP_FIGURES = tuple(row for row in FIGURES if row[0] not in {"load_max_over_mean", "failed_ratio"})
UNPRICED_GROUP_FIGURES = tuple(row for row in GROUP_FIGURES if row[0] != "money_per_day")


@require_GET
def report_page(request: HttpRequest) -> HttpResponse:
    """The report of ``?rollout=ID``, or of ``?pool=NAME&at=TIME&span=24h``. A fixed number of queries."""
    pools, rollout, error = list(viewable(request, Pool.objects.all())), _rollout(request), ""
    pool = rollout.revision.policy.pool if rollout else _pool(request, pools)
    report = None
    try:
        at = _at(request)
        seconds = length_s(request.GET.get("span", DEFAULT)) or 0.0
        if pool is not None:
            windows = report_windows(timezone.now(), pool, at=at, rollout=rollout, span=timedelta(seconds=seconds))
            report = report_of(pool, windows, viewable(request, Event.objects.select_related("actor")))
    except InvalidError as invalid:
        error = "; ".join(fault.reason for fault in invalid.faults)
    context: dict[str, Any] = {
        "pools": pools,
        "pool": pool,
        "rollout": rollout,
        "at": request.GET.get("at", ""),
        "span": request.GET.get("span", DEFAULT),
        "spans": SPANS,
        "error": error,
        "report": report,
        "now": timezone.now(),
        "rows": comparison_rows(report.pool, FIGURES, has_verdict=not report.no_verdict) if report else [],
        "groups": _group_rows(report) if report else [],
    }
    return render(request, "telemetry/report.html", context, status=422 if error and not rollout else 200)


def _rollout(request: HttpRequest) -> Rollout | None:
    if not request.GET.get("rollout"):
        return None
    rollouts = Rollout.objects.select_related("revision__policy__pool__project", "revision__policy__group")
    return get_object_or_404(viewable(request, rollouts), pk=int_parameter(request, "rollout") or 0)


def _pool(request: HttpRequest, pools: list[Pool]) -> Pool | None:
    name = request.GET.get("pool")
    return get_object_or_404(viewable(request, Pool.objects.all()), name=name) if name else next(iter(pools), None)


def _at(request: HttpRequest) -> datetime | None:
    text = request.GET.get("at", "")
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidError("$.at", "expected a time such as 2026-01-31T13:45, in UTC") from None
    return at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)


def comparison_rows(
    row: Comparison, figures: tuple[tuple[str, str, str, bool | None], ...], *, has_verdict: bool
) -> list[dict[str, Any]]:
    """Each figure with its values before and after, and whether the difference is good news."""
    found = []
    for name, label, unit, less_is_better in figures:
        change = row.difference(name)
        is_shown = any(digit in "123456789" for digit in report_change(change, unit))
        is_good = (
            None
            if not (has_verdict and change and is_shown) or less_is_better is None
            else (change < 0) == less_is_better
        )
        found.append(
            {
                "label": label,
                "unit": unit,
                "before": getattr(row.before, name),
                "after": getattr(row.after, name),
                "change": change,
                "word": "" if is_good is None else "better" if is_good else "worse",
            }
        )
    return found


def _group_rows(report: Report) -> list[tuple[str, list[dict[str, Any]]]]:
    shown = GROUP_FIGURES if report.price else UNPRICED_GROUP_FIGURES
    return [(row.name, comparison_rows(row, shown, has_verdict=False)) for row in report.groups]
