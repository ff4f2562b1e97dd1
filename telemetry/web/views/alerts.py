"""Alerts: what is wrong now, what was, and one alert from its first suspicion to its end."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_POST

from controlplane.access.asker import asker_of
from controlplane.access.scope import visible
from controlplane.errors import InvalidError
from controlplane.models import Pool
from controlplane.web.doors import refusals_as_messages, signed_in
from controlplane.web.paging import number_asked
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.message import overview_path
from telemetry.models import Alert, AlertRule, AlertState, Notification, RuleKind, Severity
from telemetry.services.alerts.acknowledgements import acknowledge, release
from telemetry.services.alerts.filters import AlertFilter
from telemetry.services.alerts.listing import open_alerts, past_alerts
from telemetry.services.alerts.previews import look_back
from telemetry.services.alerts.rules import rules
from telemetry.web.sketch import draw

PAGE = 50  # ended alerts on a page
LOOK_BACK = timedelta(hours=1)  # of an alert's drawing before it began
LOOK_ON = timedelta(minutes=15)  # and after it ended
LONGEST = timedelta(days=2)
FILTERS = ("pool", "kind", "severity", "after", "before")  # of what is over; as over REST


@require_GET
def alert_list(request: HttpRequest) -> HttpResponse:
    """Open alerts by how they are told, past ones as asked, and every rule; a refresh leaves out the frame."""
    asker = asker_of(request)
    opened = list(visible(asker, open_alerts()))
    firing = [alert for alert in opened if alert.state == AlertState.FIRING]
    context = {
        "firing": [alert for alert in firing if alert.muted is None],
        "muted": [alert for alert in firing if alert.muted is not None],
        "pending": [alert for alert in opened if alert.state == AlertState.PENDING],
        "rules": [{"rule": rule, "finds": _finds(rule)} for rule in visible(asker, rules())],
        "pools": list(visible(asker, Pool.objects.all())),
        **_past(request),
    }
    refresh = request.headers.get("HX-Request") == "true"
    return render(request, "telemetry/alerts_live.html" if refresh else "telemetry/alerts.html", context)


def _past(request: HttpRequest) -> dict[str, Any]:
    """A page of what is over, narrowed as asked."""
    asked = AlertFilter(request.GET, queryset=visible(asker_of(request), past_alerts()).order_by("-pk"))
    older = number_asked(request, "older")
    found = asked.qs if asked.is_valid() else Alert.objects.none()
    page = list((found.filter(pk__lt=older) if older else found)[: PAGE + 1])
    return {
        "recent": page[:PAGE],
        "more": page[PAGE - 1].pk if len(page) > PAGE else None,
        "later": bool(older),
        "wrong": asked.errors,
        "asked": {name: request.GET.get(name, "") for name in FILTERS},
        "filtered": any(request.GET.get(name) for name in FILTERS) or bool(older),
        "kinds": RuleKind.choices,
        "severities": Severity.choices,
    }


def _finds(rule: AlertRule) -> str:
    """What a rule looks for, in half a sentence."""
    kind = KINDS[rule.kind]
    try:
        return kind.finds(kind.read(rule.settings))
    except InvalidError as error:
        return f"its settings cannot be read: {error}"


@require_GET
def alert_page(request: HttpRequest, alert_id: int) -> HttpResponse:
    """One alert: its figures, its drawing, its causes, its life."""
    rows = Alert.objects.select_related("rule", "rule__group", "pool")
    alert = get_object_or_404(rows, pk=alert_id)
    now = timezone.now()
    told = Notification.objects.filter(alert_ids__contains=[alert.pk], created_at__gte=alert.started_at)
    context = {
        "alert": alert,
        "kind": KINDS[alert.rule.kind],
        "steps": alert.steps.select_related("by"),
        "told": told.select_related("channel").order_by("number")[:PAGE],
        "overview": overview_path(alert, now),
        "is_open": alert.state != AlertState.RESOLVED,
        **_drawing(alert, now),
    }
    refresh = request.headers.get("HX-Request") == "true"
    return render(request, "telemetry/alert_live.html" if refresh else "telemetry/alert.html", context)


def _drawing(alert: Alert, now: Any) -> dict[str, Any]:
    """What the rule saw from an hour before the alert on; nothing where that cannot be said any more."""
    kind, rule = KINDS[alert.rule.kind], alert.rule
    end = min((alert.resolved_at + LOOK_ON) if alert.resolved_at else now, now)
    start = max(alert.started_at - LOOK_BACK, end - LONGEST)
    group = rule.group.name if rule.group else ""
    try:
        seen = look_back(kind, kind.read(rule.settings), alert.pool, group=group, start=start, end=end)
    except InvalidError:
        return {}
    sentence = f"{kind.figure} and its limit from {start:%H:%M} to {end:%H:%M} UTC. {alert.summary}"
    return {
        "sketch": draw(seen.points, seen.episodes, seen.start, seen.end, sentence=sentence),
        "points": seen.points[::-1],
    }


@require_POST
def alert_acknowledge(request: HttpRequest, alert_id: int) -> HttpResponse:
    """Take an alert."""
    alert = get_object_or_404(Alert, pk=alert_id)
    with refusals_as_messages(request):
        acknowledge(alert, by=signed_in(request), why=request.POST.get("note", ""))
        messages.success(request, "The alert is yours; it is not told again.")
    return redirect("telemetry:alert", alert_id)


@require_POST
def alert_release(request: HttpRequest, alert_id: int) -> HttpResponse:
    """Let an alert go again."""
    alert = get_object_or_404(Alert, pk=alert_id)
    with refusals_as_messages(request):
        release(alert, by=signed_in(request))
        messages.success(request, "The alert is nobody's now, and is told again when that is due.")
    return redirect("telemetry:alert", alert_id)
