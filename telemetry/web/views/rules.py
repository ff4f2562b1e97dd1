"""Alert rules: a form that previews when the rule would have fired."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect
from django.urls import reverse
from django.views.decorators.http import require_http_methods

from controlplane.models import Pool
from controlplane.web.base import confirm_page, current_user, is_refresh, manageable, render_live
from controlplane.web.tags import setting
from telemetry.alerts.kinds import KINDS
from telemetry.models import AlertRule, RuleKind, Severity
from telemetry.models.alert import REPEAT_S
from telemetry.services.alerts.previews import preview_rule
from telemetry.services.alerts.rules import create_rule, delete_rule, effective_settings, update_rule
from telemetry.web.breakdown_figures import draw
from telemetry.web.forms import RuleForm


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
    form = RuleForm(kind, _data(request, initial), initial=initial, pools=pools)
    page = {"title": "Add alert rule", "action": "Add rule"}
    if form.is_valid():
        pool, arguments = form.cleaned_data["pool"], form.arguments()
        if "preview" in request.POST:
            return _page(request, form, page, preview_of=pool)
        with form.service_errors():
            create_rule(pool, kind=kind.name, **arguments, by=current_user(request))
            messages.success(request, f"Rule {form.cleaned_data['name']} was created.")
            return redirect("telemetry:alerts")
    return _page(request, form, page | {"kinds": list(KINDS.values())})


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
    form = RuleForm(KINDS[rule.kind], _data(request, initial), initial=initial).editing(rule)
    if form.is_valid():
        if "preview" in request.POST:
            return _page(request, form, page, preview_of=rule.pool)
        with form.service_errors(), form.locked():
            update_rule(rule, **form.arguments(), by=current_user(request))
            messages.success(request, f"Rule {form.cleaned_data['name']} was changed.")
            return redirect("telemetry:alerts")
    return _page(request, form, page)


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


def _data(request: HttpRequest, initial: dict[str, Any]) -> Any:
    """The submitted data; fields that an older page or a script omits keep their values."""
    if request.method != "POST":
        return None
    data = request.POST.copy()
    for name in ("severity", "repeat_s", "group", "runbook_url"):
        if name in initial:
            data.setdefault(name, initial[name])
    return data


def _page(
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
