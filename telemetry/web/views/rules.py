"""Alert rules: made and changed on a page that shows what they would have done."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.contrib.auth.models import User
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from controlplane.errors import ControlPlaneError
from controlplane.models import Pool
from controlplane.web.base import errors_as_messages, signed_in, within
from controlplane.web.tags import setting
from telemetry.alerts.kinds import KINDS, Kind
from telemetry.models import AlertRule, RuleKind, Severity
from telemetry.models.alert import REPEAT_S
from telemetry.services.alerts.previews import preview_rule
from telemetry.services.alerts.rules import create_rule, delete_rule, effective_settings, update_rule
from telemetry.web.forms import RuleForm
from telemetry.web.ladder_figures import draw


@require_http_methods(["GET", "POST"])
def rule_new(request: HttpRequest) -> HttpResponse:
    """A rule for a pool, of the kind that the address names."""
    asked = request.GET.get("kind", "")
    kind = KINDS[asked if asked in KINDS else RuleKind.HIT_RATE_DROP.value]
    initial = {"name": kind.label, "enabled": True, "severity": Severity.WARNING, "repeat_s": REPEAT_S}
    pools = within(request, Pool.objects.all())
    form = RuleForm(kind, _given(request, initial), initial=initial, pools=pools)
    if request.method == "POST" and form.is_valid():
        if "preview" in request.POST:
            return _page(request, form, "Add an alert rule", "Add the rule", pool=form.cleaned_data["pool"])
        if _created(form, signed_in(request)):
            messages.success(request, f"Rule {form.cleaned_data['name']} was created.")
            return redirect("telemetry:alerts")
    return _page(request, form, "Add an alert rule", "Add the rule", kinds=list(KINDS.values()))


@require_http_methods(["GET", "POST"])
def rule_edit(request: HttpRequest, rule_id: int) -> HttpResponse:
    """Change a rule; disabling it ends its alerts."""
    rule = get_object_or_404(AlertRule.objects.select_related("pool", "group"), pk=rule_id)
    initial = {
        "name": rule.name,
        "enabled": rule.enabled,
        "group": rule.group.name if rule.group else "",
        "severity": rule.severity,
        "repeat_s": rule.repeat_s,
        **{name: "none" if value is None else setting(value) for name, value in effective_settings(rule).items()},
    }
    title = f"Rule {rule.name} of pool {rule.pool.name}"
    form = RuleForm(KINDS[rule.kind], _given(request, initial), initial=initial)
    if request.method == "POST" and form.is_valid():
        if "preview" in request.POST:
            return _page(request, form, title, "Save", rule=rule, pool=rule.pool)
        if _changed(rule, form, signed_in(request)):
            messages.success(request, f"Rule {form.cleaned_data['name']} was changed.")
            return redirect("telemetry:alerts")
    return _page(request, form, title, "Save", rule=rule)


@require_http_methods(["GET", "POST"])
def rule_remove(request: HttpRequest, rule_id: int) -> HttpResponse:
    """Remove a rule with its alerts, after saying what will happen."""
    rule = get_object_or_404(AlertRule.objects.select_related("pool"), pk=rule_id)
    if request.method == "POST":
        with errors_as_messages(request):
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


def _given(request: HttpRequest, initial: dict[str, Any]) -> Any:
    """What was sent; what a form of an earlier release or a script leaves out is as it was."""
    if request.method != "POST":
        return None
    given = request.POST.copy()
    for name in ("severity", "repeat_s", "group"):
        if name in initial:
            given.setdefault(name, initial[name])
    return given


def _page(
    request: HttpRequest, form: RuleForm, title: str, action: str, *, pool: Pool | None = None, **extra: Any
) -> HttpResponse:
    kind: Kind = form.kind
    preview = _preview(form, pool) if pool is not None else {}
    context = {"form": form, "kind": kind, "title": title, "action": action, **preview, **extra}
    part = request.headers.get("HX-Request") == "true" and pool is not None
    template = "telemetry/rule_preview.html" if part else "telemetry/rule.html"
    return render(request, template, context, status=422 if form.errors and not part else 200)


def _preview(form: RuleForm, pool: Pool) -> dict[str, Any]:
    """What the rule in the form would have done; a refusal stands beside its field."""
    group = form.cleaned_data.get("group") or None
    try:
        found = preview_rule(pool, kind=form.kind.name, settings=form.settings(), group=group)
    except ControlPlaneError as error:
        form.refuse(error)
        return {"previewed": True}
    sketch = draw(found.points, found.episodes, found.start, found.end, sentence=found.sentence)
    return {"previewed": True, "preview": found, "sketch": sketch}


def _created(form: RuleForm, by: User) -> bool:
    filled = form.rest()
    try:
        create_rule(form.cleaned_data["pool"], kind=form.kind.name, settings=form.settings(), **filled, by=by)
    except ControlPlaneError as error:
        form.refuse(error)
        return False
    return True


def _changed(rule: AlertRule, form: RuleForm, by: User) -> bool:
    try:
        update_rule(rule, settings=form.settings(), **form.rest(), by=by)
    except ControlPlaneError as error:
        form.refuse(error)
        return False
    return True
