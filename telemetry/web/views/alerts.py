"""Alerts, silences and alert rules; the form of a rule previews when it would have fired."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from django.contrib import messages
from django.db import transaction
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.utils.http import url_has_allowed_host_and_scheme
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.access.actor import actor_of
from controlplane.access.middleware import required_role
from controlplane.errors import InvalidError
from controlplane.models import Pool, Project, RoutingPolicy
from controlplane.web.base import (
    confirm_page,
    current_user,
    errors_as_messages,
    first_page,
    int_parameter,
    is_refresh,
    manageable,
    render_live,
    viewable,
)
from controlplane.web.tags import setting
from telemetry.alerts.kinds import KINDS
from telemetry.alerts.message import changed_at, headline, overview_path
from telemetry.alerts.remedies import present_remedy
from telemetry.causes import CauseKind
from telemetry.matchers import Matcher, Value
from telemetry.models import Alert, AlertRule, AlertState, AlertTransition, Notification, RuleKind, Severity, Silence
from telemetry.models.alert import REPEAT_S
from telemetry.services.alerts import alerts as service
from telemetry.services.alerts.alerts import open_alerts
from telemetry.services.alerts.previews import preview_period, preview_rule
from telemetry.services.alerts.rules import create_rule, delete_rule, effective_settings, rules, update_rule
from telemetry.web.breakdown_figures import draw
from telemetry.web.forms import RuleForm, SilenceForm
from telemetry.web.pages import firing_count, live_part, strip_html

PAGE = 50
BEFORE_ALERT = timedelta(hours=1)  # of an alert's chart before the alert
AFTER_ALERT = timedelta(minutes=15)
MAX_CHART = timedelta(days=2)
FILTERS = ("pool", "kind", "severity", "after", "before")  # of resolved alerts, as over REST
SILENCED_BY = ("pool", "group", "replica", "rule")  # labels in the default matchers of an alert


@live_part
def status(request: HttpRequest) -> HttpResponse:
    """The status strip of every page and the number of firing alerts, for a refresh."""
    return HttpResponse(strip_html(request) + firing_count(request))


@require_GET
def alert_list(request: HttpRequest) -> HttpResponse:
    """Open alerts, resolved alerts that match the filters, and all rules."""
    opened = list(viewable(request, open_alerts()))
    firing = [alert for alert in opened if alert.state == AlertState.FIRING]
    pending = [alert for alert in opened if alert.state == AlertState.PENDING]
    states = {alert.rule_id: alert.state for alert in (*pending, *firing)}  # firing replaces pending
    context = {
        "firing": [alert for alert in firing if alert.suppression is None],
        "suppressed": [alert for alert in firing if alert.suppression is not None],
        "pending": pending,
        "rules": [
            {"rule": rule, "condition": _condition(rule), "state": states.get(rule.pk, "")}
            for rule in sorted(viewable(request, rules()), key=_rule_order)
        ],
        "pools": list(viewable(request, Pool.objects.all())),
        "policy_ids": _policies_of_causes(request, firing),
        **_resolved(request),
    }
    return render_live(request, "telemetry/alerts.html", context)


def _policies_of_causes(request: HttpRequest, alerts: Iterable[Alert]) -> dict[str, int]:
    """The ids, by name, of the policies whose revisions are probable causes. One query if there are any."""
    causes = [cause for alert in alerts for cause in alert.causes if cause["kind"] == CauseKind.REVISION]
    if not causes:
        return {}
    named = RoutingPolicy.objects.filter(name__in={cause["evidence"]["policy"] for cause in causes})
    return dict(viewable(request, named).values_list("name", "pk"))


def _resolved(request: HttpRequest) -> dict[str, Any]:
    filters = service.AlertFilter(request.GET, queryset=viewable(request, service.resolved_alerts()).order_by("-pk"))
    older = int_parameter(request, "older")
    alerts = filters.qs if filters.is_valid() else Alert.objects.none()
    page, last = first_page(alerts.filter(pk__lt=older) if older else alerts, PAGE)
    return {
        "recent": page,
        "older_cursor": last and last.pk,
        "has_newer": bool(older),
        "filter_errors": filters.errors,
        "filters": {name: request.GET.get(name, "") for name in FILTERS},
        "filtered": any(request.GET.get(name) for name in FILTERS) or bool(older),
        "kinds": RuleKind.choices,
        "severities": Severity.choices,
    }


def _rule_order(rule: AlertRule) -> tuple[str, int, str]:
    """By pool and kind; kinds of a later release last."""
    kinds = RuleKind.values
    return rule.pool.name, kinds.index(rule.kind) if rule.kind in kinds else len(kinds), rule.kind


def _condition(rule: AlertRule) -> str:
    """The condition of a rule as text."""
    if (kind := KINDS.get(rule.kind)) is None:
        return "not evaluated: its kind is of a later release"
    try:
        return kind.condition(kind.read(rule.settings))
    except InvalidError as error:
        return f"invalid settings: {error}"


@require_GET
def alert_page(request: HttpRequest, alert_id: int) -> HttpResponse:
    """One alert: values, causes, chart, timeline and notifications."""
    alert = get_object_or_404(Alert.objects.select_related("rule", "rule__group", "pool"), pk=alert_id)
    now = timezone.now()
    notifications = Notification.objects.filter(alert_ids__contains=[alert.pk], created_at__gte=alert.started_at)
    listed = list(notifications.select_related("channel").order_by("number")[:PAGE])
    history = list(alert.history.select_related("by"))
    context = {
        "alert": alert,
        "kind": KINDS.get(alert.rule.kind),
        "history": history,
        "notifications": listed,
        "was_notified": any(entry.transition == AlertTransition.NOTIFIED for entry in history),
        "overdue": sorted({notification.channel.name for notification in listed if notification.is_overdue}),
        "overview": overview_path(alert, now),
        "policy_ids": _policies_of_causes(request, [alert]),
        "is_open": alert.state != AlertState.RESOLVED,
        "remedy": present_remedy(alert),
        **_chart(alert, now),
    }
    return render_live(request, "telemetry/alert.html", context)


def _chart(alert: Alert, now: datetime) -> dict[str, Any]:
    """The rule's value and limit since an hour before the alert; {} if settings or kind are unknown."""
    rule, kind = alert.rule, KINDS.get(alert.rule.kind)
    if kind is None:
        return {}
    end = min((alert.resolved_at + AFTER_ALERT) if alert.resolved_at else now, now)
    start = max(alert.started_at - BEFORE_ALERT, end - MAX_CHART)
    group = rule.group.name if rule.group else ""
    try:
        period = preview_period(kind, kind.read(rule.settings), alert.pool, group=group, start=start, end=end)
    except InvalidError:
        return {}
    summary = f"{kind.figure} and its limit from {start:%H:%M} to {end:%H:%M} UTC. {headline(alert)}."
    change, words = changed_at(alert)
    if change is not None:
        summary += f" A vertical line at {change:%H:%M:%S} UTC: {words}."
    sketch = draw(period.points, period.episodes, period.start, period.end, summary=summary, change=change)
    return {"sketch": sketch, "points": period.points[::-1], "change": change, "change_words": words}


@require_POST
def alert_acknowledge(request: HttpRequest, alert_id: int) -> HttpResponse:
    """Acknowledge an alert."""
    alert = get_object_or_404(Alert, pk=alert_id)
    with errors_as_messages(request):
        service.acknowledge(alert, by=current_user(request), note=request.POST.get("note", ""))
        messages.success(request, "You acknowledged the alert. No further notifications are sent for it.")
    page = request.POST.get("next", "")  # where the status strip was
    is_own = page.startswith("/") and url_has_allowed_host_and_scheme(page, allowed_hosts=None)
    return redirect(page) if is_own else redirect("telemetry:alert", alert_id)


@require_POST
def alert_unacknowledge(request: HttpRequest, alert_id: int) -> HttpResponse:
    """Undo the acknowledgement of an alert."""
    alert = get_object_or_404(Alert, pk=alert_id)
    with errors_as_messages(request):
        service.unacknowledge(alert, by=current_user(request))
        messages.success(request, "The alert is no longer acknowledged. Notifications are repeated.")
    return redirect("telemetry:alert", alert_id)


@require_GET
def silence_list(request: HttpRequest) -> HttpResponse:
    """Current, future and expired silences."""
    context = {
        "current": [_line(row) for row in viewable(request, service.silences())],
        "past": [_line(row) for row in viewable(request, service.silences(ended=True))[:PAGE]],
        "now": timezone.now(),
    }
    return render(request, "telemetry/silences.html", context)


def _line(silence: Silence) -> dict[str, Any]:
    return {"silence": silence, "conditions": " and ".join(service.conditions(silence))}


@require_http_methods(["GET", "POST"])
def silence_new(request: HttpRequest) -> HttpResponse:
    """Create a silence, with a preview of what it matches; or one for each of several alerts in the URL."""
    texts = request.GET.getlist("alert")
    numbers = {int(text) for text in texts if text.isascii() and text.isdigit() and len(text) < 19}
    rows = service.alerts().select_related("pool__project").filter(pk__in=numbers if len(numbers) <= PAGE else ())
    alerts = list(manageable(request, rows))
    several = alerts if len(numbers) > 1 else []
    if len(numbers) > 1 and not several:
        messages.error(request, f"Select 1 to {PAGE} alerts that you may silence. Nothing was silenced.")
        return redirect("telemetry:alerts")
    form = SilenceForm(
        request.POST or None,
        initial={"matchers": "\n".join(_matchers(alerts[0])) if alerts else "", "hours": "4"},
        projects=manageable(request, Project.objects.all()),
        everywhere=actor_of(request).may(required_role(request), None),
        several=bool(several),
    )
    matched: list[Alert] | None = None
    if form.is_valid():
        values = form.cleaned_data
        with form.service_errors():
            if "preview" in request.POST and not several:
                candidates = viewable(request, open_alerts())
                matched = service.matching_alerts(values["matchers"], project=values["project"], candidates=candidates)
            else:
                each = [(_matchers(alert, exactly=True), alert.pool.project) for alert in several]
                ends_at, by = timezone.now() + timedelta(hours=int(values["hours"])), current_user(request)
                with transaction.atomic():
                    for matchers, project in each or [(values["matchers"], values["project"])]:
                        service.create_silence(
                            matchers=matchers, project=project, ends_at=ends_at, comment=values["comment"], by=by
                        )
                messages.success(request, "Silence created. Matching alerts still fire, but send no notifications.")
                return redirect("telemetry:silences")
    context = {"form": form, "matched": matched, "several": several}
    return render(request, "telemetry/silence_new.html", context, status=422 if form.errors else 200)


def _matchers(alert: Alert, *, exactly: bool = False) -> list[str]:
    """Matchers of an alert's labels; exactly: and of no alert with a label that this one lacks."""
    values = {name: alert.labels.get(name, "") for name in SILENCED_BY}
    return [str(Matcher(name, "=", (Value(text),))) for name, text in values.items() if text or exactly]


@require_POST
def silence_end(request: HttpRequest, silence_id: int) -> HttpResponse:
    """Expire a silence now."""
    silence = get_object_or_404(Silence, pk=silence_id)
    with errors_as_messages(request):
        service.end_silence(silence, by=current_user(request))
        messages.success(request, "The silence has expired. Firing alerts send notifications again.")
    return redirect("telemetry:silences")


@require_http_methods(["GET", "POST"])
def rule_new(request: HttpRequest) -> HttpResponse:
    """Add a rule of the kind in the URL, for the pool and the task group in it."""
    name = request.GET.get("kind", "")
    kind = KINDS[name if name in KINDS else RuleKind.HIT_RATE_DROP.value]
    pools, group = manageable(request, Pool.objects.all()), request.GET.get("group", "")
    initial = {
        "name": f"{kind.label} of {group}" if group else kind.label,
        "enabled": True,
        "pool": pools.filter(name=request.GET.get("pool", "")).first(),
        "group": group,
        "severity": Severity.WARNING,
        "repeat_s": REPEAT_S,
    }
    form = RuleForm(kind, _rule_data(request, initial), initial=initial, pools=pools)
    page = {"title": "Add alert rule", "action": "Add rule"}
    if form.is_valid():
        pool, arguments = form.cleaned_data["pool"], form.arguments()
        if "preview" in request.POST:
            return _rule_page(request, form, page, preview_of=pool)
        with form.service_errors():
            create_rule(pool, kind=kind.name, **arguments, by=current_user(request))
            messages.success(request, f"Rule {form.cleaned_data['name']} was created.")
            return redirect("telemetry:alerts")
    return _rule_page(request, form, page | {"kinds": list(KINDS.values())})


@require_http_methods(["GET", "POST"])
def rule_edit(request: HttpRequest, rule_id: int) -> HttpResponse:
    """Change a rule. Disabling it resolves its alerts."""
    rule = get_object_or_404(AlertRule.objects.select_related("pool", "group"), pk=rule_id)
    page = {"title": f"Rule {rule.name} of pool {rule.pool.name}", "action": "Save", "rule": rule}
    if rule.kind not in KINDS:
        return render_live(request, "telemetry/rule.html", page, status=409 if request.method == "POST" else 200)
    initial = {
        "name": rule.name,
        "enabled": rule.enabled,
        "group": rule.group.name if rule.group else "",
        "severity": rule.severity,
        "repeat_s": rule.repeat_s,
        "runbook_url": rule.runbook_url,
        **{name: "none" if value is None else setting(value) for name, value in effective_settings(rule).items()},
    }
    form = RuleForm(KINDS[rule.kind], _rule_data(request, initial), initial=initial).editing(rule)
    if form.is_valid():
        if "preview" in request.POST:
            return _rule_page(request, form, page, preview_of=rule.pool)
        with form.service_errors(), form.locked():
            update_rule(rule, **form.arguments(), by=current_user(request))
            messages.success(request, f"Rule {form.cleaned_data['name']} was changed.")
            return redirect("telemetry:alerts")
    return _rule_page(request, form, page)


@require_http_methods(["GET", "POST"])
def rule_remove(request: HttpRequest, rule_id: int) -> HttpResponse:
    """Remove a rule with its alerts."""
    rule = get_object_or_404(AlertRule.objects.select_related("pool"), pk=rule_id)
    return confirm_page(
        request,
        partial(delete_rule, rule, by=current_user(request)),
        back="telemetry:alerts",
        cancel=reverse("telemetry:rule", args=[rule.pk]),
        title=f"Remove rule {rule.name}",
        text="Its alerts are removed too; a firing alert is resolved first, and its channels are notified. To stop a "
        "rule for a while, disable it instead.",
        action="Remove rule",
        done=f"Rule {rule.name} was removed.",
    )


def _rule_data(request: HttpRequest, initial: dict[str, Any]) -> Any:
    """The submitted data; fields that an older page or a script omits keep their values."""
    if request.method != "POST":
        return None
    data = request.POST.copy()
    for name in ("severity", "repeat_s", "group", "runbook_url"):
        if name in initial:
            data.setdefault(name, initial[name])
    return data


def _rule_page(
    request: HttpRequest, form: RuleForm, context: dict[str, Any], *, preview_of: Pool | None = None
) -> HttpResponse:
    if preview_of is not None:
        context |= _preview(form, preview_of)
    partial_page = is_refresh(request) and preview_of is not None
    context |= {"form": form, "kind": form.kind}
    status = 422 if form.errors and not partial_page else 200
    return render_live(request, "telemetry/rule.html", context, partial=partial_page, status=status)


def _preview(form: RuleForm, pool: Pool) -> dict[str, Any]:
    """When the rule would have fired; a service's error is added to the form."""
    group = form.cleaned_data.get("group") or None
    context: dict[str, Any] = {"previewed": True}
    with form.service_errors():
        preview = preview_rule(pool, kind=form.kind.name, settings=form.settings(), group=group)
        sketch = draw(preview.points, preview.episodes, preview.start, preview.end, summary=preview.summary)
        context |= {"preview": preview, "sketch": sketch}
    return context
