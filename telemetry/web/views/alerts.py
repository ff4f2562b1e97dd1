"""Alerts: what is wrong now, what was, and one alert from its first suspicion to its end.

Silences: what is not told for a while, made on a page that shows first whom it would be for.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django import forms
from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.access.actor import actor_of, visible
from controlplane.access.middleware import required_role
from controlplane.errors import ControlPlaneError, InvalidError
from controlplane.models import Pool, Project
from controlplane.web.base import errors_as_messages, signed_in, within
from controlplane.web.forms.base import Form
from controlplane.web.tables import int_parameter
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.message import overview_path
from telemetry.matchers import Matcher
from telemetry.models import Alert, AlertRule, AlertState, Notification, RuleKind, Severity, Silence
from telemetry.services.alerts import silences as service
from telemetry.services.alerts.alerts import AlertFilter, acknowledge, open_alerts, past_alerts, unacknowledge
from telemetry.services.alerts.previews import preview_period
from telemetry.services.alerts.rules import rules
from telemetry.web.forms import ConditionsField
from telemetry.web.ladder_figures import draw

PAGE = 50  # ended alerts on a page
LOOK_BACK = timedelta(hours=1)  # of an alert's drawing before it began
LOOK_ON = timedelta(minutes=15)  # and after it ended
LONGEST = timedelta(days=2)
FILTERS = ("pool", "kind", "severity", "after", "before")  # of what is over; as over REST


@require_GET
def alert_list(request: HttpRequest) -> HttpResponse:
    """Open alerts by how they are told, past ones as asked, and every rule; a refresh leaves out the frame."""
    actor = actor_of(request)
    opened = list(visible(actor, open_alerts()))
    firing = [alert for alert in opened if alert.state == AlertState.FIRING]
    context = {
        "firing": [alert for alert in firing if alert.muted is None],
        "muted": [alert for alert in firing if alert.muted is not None],
        "pending": [alert for alert in opened if alert.state == AlertState.PENDING],
        "rules": [{"rule": rule, "finds": _finds(rule)} for rule in visible(actor, rules())],
        "pools": list(visible(actor, Pool.objects.all())),
        **_past(request),
    }
    refresh = request.headers.get("HX-Request") == "true"
    return render(request, "telemetry/alerts_live.html" if refresh else "telemetry/alerts.html", context)


def _past(request: HttpRequest) -> dict[str, Any]:
    """A page of what is over, narrowed as asked."""
    asked = AlertFilter(request.GET, queryset=visible(actor_of(request), past_alerts()).order_by("-pk"))
    older = int_parameter(request, "older")
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
        return kind.condition(kind.read(rule.settings))
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
        seen = preview_period(kind, kind.read(rule.settings), alert.pool, group=group, start=start, end=end)
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
    with errors_as_messages(request):
        acknowledge(alert, by=signed_in(request), why=request.POST.get("note", ""))
        messages.success(request, "The alert is yours; it is not told again.")
    return redirect("telemetry:alert", alert_id)


@require_POST
def alert_release(request: HttpRequest, alert_id: int) -> HttpResponse:
    """Let an alert go again."""
    alert = get_object_or_404(Alert, pk=alert_id)
    with errors_as_messages(request):
        unacknowledge(alert, by=signed_in(request))
        messages.success(request, "The alert is nobody's now, and is told again when that is due.")
    return redirect("telemetry:alert", alert_id)


PAST = 50
LENGTHS = (("1", "1 hour"), ("4", "4 hours"), ("24", "1 day"), ("168", "7 days"), ("720", "30 days"))  # in hours
USUAL = ("pool", "group", "replica", "rule")  # labels by which an alert is silenced unless somebody says otherwise


class SilenceForm(Form):
    """A new silence: conditions one a line, so that it needs no script."""

    matchers = ConditionsField(label="For alerts with", rows=4)
    hours = forms.ChoiceField(label="For", choices=LENGTHS, initial="4")
    project = forms.ModelChoiceField(Project.objects.none(), required=False, empty_label="all projects")
    comment = forms.CharField(max_length=500, label="Why", help_text="For whoever wonders why nobody was told.")

    def __init__(self, *args: Any, projects: QuerySet[Project], everywhere: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        choice = self.fields["project"]
        if isinstance(choice, forms.ModelChoiceField):
            choice.queryset = projects
            choice.required = not everywhere
            choice.empty_label = "all projects" if everywhere else None


@require_GET
def silence_list(request: HttpRequest) -> HttpResponse:
    """What is silenced now or will be, and what was."""
    actor, now = actor_of(request), timezone.now()
    held = [_line(silence) for silence in visible(actor, service.silences())]
    past = [_line(silence) for silence in visible(actor, service.silences(ended=True))[:PAST]]
    return render(request, "telemetry/silences.html", {"held": held, "past": past, "now": now})


def _line(silence: Silence) -> dict[str, Any]:
    return {"silence": silence, "words": " and ".join(service.conditions(silence))}


@require_http_methods(["GET", "POST"])
def silence_new(request: HttpRequest) -> HttpResponse:
    """Silence alerts; a look at which ones comes first."""
    may_all = actor_of(request).may(required_role(request), None)
    initial = {"matchers": _of_alert(request), "hours": "4"}
    form = SilenceForm(
        request.POST or None, initial=initial, projects=within(request, Project.objects.all()), everywhere=may_all
    )
    found: list[Alert] | None = None
    if request.method == "POST" and form.is_valid():
        if "preview" in request.POST:
            found = _matched(request, form)
        elif _created(request, form):
            messages.success(request, "Silenced. The alerts go on, and nobody is told of them.")
            return redirect("telemetry:silences")
    status = 422 if form.errors else 200
    return render(request, "telemetry/silence_new.html", {"form": form, "found": found}, status=status)


def _of_alert(request: HttpRequest) -> str:
    """The usual matchers of the alert that the address names."""
    number = int_parameter(request, "alert")
    alert = visible(actor_of(request), Alert.objects.filter(pk=number)).first() if number else None
    if alert is None:
        return ""
    named = ({"label": name, "value": alert.labels[name]} for name in USUAL if name in alert.labels)
    return "\n".join(str(Matcher.of(one)) for one in named)


def _matched(request: HttpRequest, form: SilenceForm) -> list[Alert] | None:
    among = visible(actor_of(request), open_alerts())
    try:
        return service.matched(form.cleaned_data["matchers"], project=form.cleaned_data["project"], among=among)
    except InvalidError as error:
        form.refuse(error)
        return None


def _created(request: HttpRequest, form: SilenceForm) -> bool:
    filled = form.cleaned_data
    ends_at = timezone.now() + timedelta(hours=int(filled["hours"]))
    try:
        service.create_silence(
            matchers=filled["matchers"],
            project=filled["project"],
            ends_at=ends_at,
            comment=filled["comment"],
            by=signed_in(request),
        )
    except ControlPlaneError as error:
        form.refuse(error)
        return False
    return True


@require_POST
def silence_end(request: HttpRequest, silence_id: int) -> HttpResponse:
    """End a silence now."""
    silence = get_object_or_404(Silence, pk=silence_id)
    with errors_as_messages(request):
        service.end_silence(silence, by=signed_in(request))
        messages.success(request, "The silence is over; what still fires is told.")
    return redirect("telemetry:silences")
