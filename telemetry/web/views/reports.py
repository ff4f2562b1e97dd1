"""What caches are worth, by week; capacity and cost of a pool; and a pool before and after a time or a rollout."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

from django import forms
from django.http import Http404, HttpRequest, HttpResponse, JsonResponse
from django.http.response import HttpResponseBase
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.gzip import gzip_page
from django.views.decorators.http import require_GET, require_POST

from controlplane.errors import InvalidError
from controlplane.models import ClientKey, Event, Pool, Rollout, RolloutState
from controlplane.web.base import csv_response, current_user, errors_as_messages, int_parameter, viewable
from controlplane.web.forms.base import Form
from telemetry.lab.shared_cache import TIERS, tier_parameters, tiers_of
from telemetry.services.lab.reports import Report, WindowComparison, events_between, report_of, report_windows
from telemetry.services.lab.sizing import create_sweep, newest_sweep, open_sweep, sizing_of
from telemetry.services.lab.value import STEPS, Value, ValueReport, changes_of, period_name, value_of
from telemetry.services.lab.what_ifs import Prediction, prediction_of
from telemetry.web.ranges import length_s, page_state
from telemetry.web.tags import report_change
from telemetry.web.views.what_ifs import WINDOWS
from telemetry.web.what_if_figures import sweep_figure

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
PREDICTED = ("hit_rate", "ttft_p50_s", "ttft_p95_s")  # by a what-if of the published settings
GROUP_FIGURES = tuple(row for row in FIGURES if row[0] not in {"load_max_over_mean", "failed_ratio"})
UNPRICED_GROUP_FIGURES = tuple(row for row in GROUP_FIGURES if row[0] != "money_per_day")

CSV_FIGURES = ("tokens", "replica_hours", "gpu_hours", "money")


@require_GET
def value_page(request: HttpRequest) -> HttpResponse:
    """What caches saved: ``?pool=NAME&by=week&at=2026-01-26``. Its queries do not depend on the length."""
    pools, chosen, report = _value(request)
    period = report.chosen
    projects, keys = {row.name: row.project_id for row in pools}, defaultdict(list)
    for key in viewable(request, ClientKey.objects.filter(revoked_at=None, groups__0__isnull=False)):
        name = f"{key.name} (tenant {key.tenant})" if key.tenant else key.name
        keys[key.project_id, (key.groups or [""])[0]].append(name)
    most = max((sum(_tokens(row)) for row in report.periods), default=0.0)
    context = {
        "pools": pools,
        "pool": chosen,
        "report": report,
        "period": period,
        "period_name": period and period_name(period, report.by),
        "rows": [
            (row, period_name(row, report.by), *(most and 1000 * tokens / most for tokens in _tokens(row)))
            for row in reversed(report.periods)
        ],
        "groups": [
            (value.pool, value.group, value, keys[projects[value.pool], value.group])
            for value in (period.groups if period else ())
        ],
        "error": _unknown_pool(request, chosen),
        "unpriced": [pool for pool in chosen_pools(pools, chosen) if report.prices[pool.name] is None],
        "has_money": any(report.prices.values()),
        "changes": changes_of(chosen_pools(pools, chosen), viewable(request, Rollout.objects.all()), report),
    }
    return render(request, "telemetry/value.html", context)


@require_GET
def value_csv(request: HttpRequest) -> HttpResponseBase:
    """Every week or day of each task group as CSV; unknown figures are empty."""
    _, chosen, report = _value(request)
    if error := _unknown_pool(request, chosen):
        raise Http404(error)

    def rows() -> Iterator[list[Any]]:
        amounts = [f"{name}_{figure}" for name in ("saved", "placement") for figure in CSV_FIGURES]
        yield ["start", "end", "measured_hours", "pool", "group", "requests", "prompt_tokens", *amounts, "currency"]
        for period in report.periods:
            for value in period.groups:
                price = report.prices[value.pool]
                yield [
                    period.start.isoformat(),
                    period.end.isoformat(),
                    period.measured_hours,
                    value.pool,
                    value.group,
                    value.requests,
                    value.prompt_tokens,
                    *(getattr(amount, name) for amount in (value.saved, value.placement) for name in CSV_FIGURES),
                    price.currency if price else None,
                ]

    return csv_response("value.csv", rows(), stream=False)


def _value(request: HttpRequest) -> tuple[list[Pool], Pool | None, ValueReport]:
    pools = list(viewable(request, Pool.objects.select_related("project")))
    chosen = next((pool for pool in pools if pool.name == request.GET.get("pool")), None)
    by = next((by for by in STEPS if by == request.GET.get("by")), None)
    try:
        at = _at(request)
    except InvalidError:
        at = None
    report = value_of(chosen_pools(pools, chosen), timezone.now(), by=by, at=at)
    return pools, chosen, report


def chosen_pools(pools: list[Pool], chosen: Pool | None) -> list[Pool]:
    """The chosen pool, or all."""
    return pools if chosen is None else [chosen]


def _unknown_pool(request: HttpRequest, chosen: Pool | None) -> str:
    name = request.GET.get("pool")
    return f"There is no pool named {name!r}. Showing all pools." if name and chosen is None else ""


def _tokens(value: Value) -> tuple[float, float]:
    """What a bar shows: hours are not known of all pools, and not in one unit."""
    return value.saved.tokens or 0.0, value.placement.tokens or 0.0


# --- capacity and cost ------------------------------------------------------------------------------------

CAPACITY_RANGE = "24h"


class TierForm(Form):
    """Latency and bandwidth of each tier; empty fields take the defaults."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, (label, default, (low, high)) in tier_parameters().items():
            self.fields[name] = forms.FloatField(
                required=False,
                min_value=low,
                max_value=high,
                label=label,
                widget=forms.TextInput({"inputmode": "decimal", "placeholder": f"{default:g}", "autocomplete": "off"}),
            )


@require_GET
def capacity_page(request: HttpRequest) -> HttpResponse:
    """What other sizes would bring, and whether a shared cache would pay."""
    state = page_state(request, default=CAPACITY_RANGE, needs_pool=True)
    pool = state.subject.pool
    form = TierForm({name: request.GET[name] for name in tier_parameters() if name in request.GET})
    context: dict[str, Any] = {"page_state": state, "pool": pool, "form": form, "windows": WINDOWS}
    if pool is not None:
        tiers = tiers_of(form.cleaned_data) if form.is_valid() else list(TIERS)
        context |= {"sizing": sizing_of(pool, state.range.window, tiers), "open_sweep": open_sweep(pool)}
    return render(request, "telemetry/capacity.html", context, status=422 if form.errors else 200)


@require_GET
@gzip_page  # the response contains no secret
def capacity_figure(request: HttpRequest, pool_name: str, slug: str) -> HttpResponse:
    """The chart of the newest sweep: ``replicas`` or ``cache``."""
    pool = get_object_or_404(viewable(request, Pool.objects.all()), name=pool_name)
    found = newest_sweep(pool)
    points = {} if found is None else found.curves
    if not points.get(slug):
        raise Http404("There is no data for this chart.")
    return JsonResponse(sweep_figure(points[slug], slug))


@require_POST
def capacity_sweep(request: HttpRequest, pool_name: str) -> HttpResponse:
    """Start a sweep, and show its progress."""
    pool = get_object_or_404(Pool, name=pool_name)
    seconds = request.POST.get("window", "")
    if seconds not in dict(WINDOWS):
        seconds = "1800"
    end = timezone.now()
    target = f"{reverse('telemetry:capacity')}?pool={pool.name}"
    with errors_as_messages(request):
        created = create_sweep(pool, start=end - timedelta(seconds=int(seconds)), end=end, by=current_user(request))
        target = reverse("telemetry:what-if", args=[created.pk])
    return redirect(target)


# --- before and after -------------------------------------------------------------------------------------


@require_GET
def report_page(request: HttpRequest) -> HttpResponse:
    """The report of ``?rollout=ID``, or of ``?pool=NAME&at=TIME&span=24h``. A fixed number of queries."""
    pools, rollout, error = list(viewable(request, Pool.objects.all())), _rollout(request), ""
    pool = rollout.revision.policy.pool if rollout else _pool(request, pools)
    report, events, more_events = None, list[Event](), False
    try:
        at = _at(request)
        seconds = length_s(request.GET.get("span", DEFAULT)) or 0.0
        if pool is not None:
            windows = report_windows(timezone.now(), pool, at=at, rollout=rollout, span=timedelta(seconds=seconds))
            report = report_of(pool, windows)
            visible_events = viewable(request, Event.objects.select_related("actor"))
            events, more_events = events_between(pool, windows, visible_events)
    except InvalidError as invalid:
        error = "; ".join(fault.reason for fault in invalid.faults)
    is_asked, rollouts = bool({"at", "span", "rollout"} & request.GET.keys()), Rollout.objects.order_by("-started_at")
    changes = viewable(request, rollouts.filter(revision__policy__pool=pool).select_related("revision__policy"))
    prediction = prediction_of(rollout) if rollout else Prediction(None)
    # After a rollout that was rolled back, or is open, other revisions place some or all of the traffic.
    is_comparable = rollout is not None and rollout.state == RolloutState.COMPLETE and bool(prediction.figures)
    context: dict[str, Any] = {
        "changes": None if rollout else changes[:20],
        "pools": pools,
        "pool": pool,
        "rollout": rollout,
        "at": request.GET.get("at", ""),
        "span": request.GET.get("span", DEFAULT),
        "spans": SPANS,
        "error": error if is_asked else "",
        "report": report,
        "events": events,
        "more_events": more_events,
        "now": timezone.now(),
        "prediction": rollout and prediction,
        "is_comparable": is_comparable,
        "predicted": PREDICTED,
        "rows": comparison_rows(report.figures, FIGURES, has_verdict=not report.no_verdict) if report else [],
        "groups": _group_rows(report) if report else [],
    }
    return render(
        request, "telemetry/report.html", context, status=422 if error and {"at", "span"} & request.GET.keys() else 200
    )


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
    row: WindowComparison, figures: tuple[tuple[str, str, str, bool | None], ...], *, has_verdict: bool
) -> list[dict[str, Any]]:
    """Each figure with its values before and after, and whether the difference is good news."""
    found = []
    for name, label, unit, less_is_better in figures:
        change = row.difference[name]
        is_shown = any(digit in "123456789" for digit in report_change(change, unit))
        is_good = (
            None
            if not (has_verdict and change and is_shown) or less_is_better is None
            else (change < 0) == less_is_better
        )
        found.append(
            {
                "name": name,
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
    shown = GROUP_FIGURES if report.currency is not None else UNPRICED_GROUP_FIGURES
    return [(row.group, comparison_rows(row, shown, has_verdict=False)) for row in report.groups]
