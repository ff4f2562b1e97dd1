"""Alerts: what is wrong now, what was, and the rules that find it."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_GET, require_http_methods

from controlplane.access.asker import asker_of
from controlplane.access.scope import visible
from controlplane.errors import ControlPlaneError
from controlplane.models import Pool
from controlplane.web.doors import signed_in, within
from telemetry.models import AlertRule
from telemetry.services.alerts import (
    create_rule,
    delete_rule,
    effective_settings,
    open_alerts,
    past_alerts,
    rules,
    update_rule,
)
from telemetry.web.forms import RuleForm

RECENT = 50  # ended alerts on the page


@require_GET
def alert_list(request: HttpRequest) -> HttpResponse:
    """Open alerts, recent ones, and every rule with what its last evaluation said; a refresh leaves out the frame."""
    asker = asker_of(request)
    context = {
        "open": list(visible(asker, open_alerts())),
        "recent": list(visible(asker, past_alerts())[:RECENT]),
        "rules": [{"rule": rule, "settings": effective_settings(rule)} for rule in visible(asker, rules())],
        "pools": visible(asker, Pool.objects.all()).exists(),
    }
    refresh = request.headers.get("HX-Request") == "true"
    return render(request, "telemetry/alerts_live.html" if refresh else "telemetry/alerts.html", context)


@require_http_methods(["GET", "POST"])
def rule_new(request: HttpRequest) -> HttpResponse:
    """A rule for a pool."""
    pools = within(request, Pool.objects.all())
    form = RuleForm(request.POST or None, initial={"enabled": True}, pools=pools)
    if request.method == "POST" and form.is_valid() and _created(form, signed_in(request)):
        messages.success(request, f"Rule {form.cleaned_data['name']} was created.")
        return redirect("telemetry:alerts")
    return _page(request, form, "Add an alert rule", "Add the rule")


@require_http_methods(["GET", "POST"])
def rule_edit(request: HttpRequest, rule_id: int) -> HttpResponse:
    """Change a rule's settings; disabling it ends its alerts."""
    rule = get_object_or_404(AlertRule.objects.select_related("pool"), pk=rule_id)
    initial = {"name": rule.name, "enabled": rule.enabled, **effective_settings(rule)}
    form = RuleForm(request.POST or None, initial=initial)
    if request.method == "POST" and form.is_valid() and _changed(rule, form, signed_in(request)):
        messages.success(request, f"Rule {form.cleaned_data['name']} was changed.")
        return redirect("telemetry:alerts")
    return _page(request, form, f"Rule {rule.name} of pool {rule.pool.name}", "Save", rule=rule)


@require_http_methods(["GET", "POST"])
def rule_remove(request: HttpRequest, rule_id: int) -> HttpResponse:
    """Remove a rule with its alerts, after saying what will happen."""
    rule = get_object_or_404(AlertRule.objects.select_related("pool"), pk=rule_id)
    if request.method == "POST":
        delete_rule(rule, by=signed_in(request))
        messages.success(request, f"Rule {rule.name} was removed.")
        return redirect("telemetry:alerts")
    context = {
        "title": f"Remove rule {rule.name}",
        "text": "Nobody is told any more when this happens. Its alerts go with it; one that is firing is resolved "
        "first, so that nobody waits for its end. To pause a rule, switch it off instead.",
        "action": "Remove the rule",
        "danger": True,
        "back": reverse("telemetry:rule", args=[rule.pk]),
    }
    return render(request, "controlplane/confirm.html", context)


def _page(request: HttpRequest, form: RuleForm, title: str, action: str, **extra: Any) -> HttpResponse:
    context = {"form": form, "title": title, "action": action, **extra}
    return render(request, "telemetry/rule.html", context, status=422 if form.errors else 200)


def _created(form: RuleForm, by: User) -> bool:
    filled = form.cleaned_data
    try:
        create_rule(filled["pool"], name=filled["name"], settings=form.settings(), enabled=filled["enabled"], by=by)
    except ControlPlaneError as error:
        form.refuse(error)
        return False
    return True


def _changed(rule: AlertRule, form: RuleForm, by: User) -> bool:
    filled = form.cleaned_data
    try:
        update_rule(rule, name=filled["name"], settings=form.settings(), enabled=filled["enabled"], by=by)
    except ControlPlaneError as error:
        form.refuse(error)
        return False
    return True
