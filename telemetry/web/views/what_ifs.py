"""Pages of what-ifs: a form, the list, one with its figures."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django import forms
from django.contrib import messages
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.errors import ControlPlaneError
from controlplane.models import Pool, RoutingPolicy
from controlplane.services.policies.publish_checks import doubt_about, finding_in
from controlplane.services.policies.settings import are_equal_settings, policy_catalogue
from controlplane.web.base import current_user, errors_as_messages, manageable, render_live, viewable
from controlplane.web.forms.base import Form
from controlplane.web.forms.policies import PublishForm
from telemetry.lab.sweeps import is_sweep
from telemetry.models import WhatIf
from telemetry.services.lab.what_ifs import (
    MAX_CANDIDATES,
    cancel_what_if,
    candidate_of_draft,
    create_what_if,
    draft_target,
    make_draft,
    what_ifs_of_settings,
)
from telemetry.web.what_if_figures import Row, charts_of, ranked_rows, rows_of

WINDOWS = (("300", "Last 5 minutes"), ("1800", "Last 30 minutes"), ("7200", "Last 2 hours"), ("21600", "Last 6 hours"))
LISTED = 30


class WhatIfForm(Form):
    """A new what-if: strategies with their default settings, numbers of replicas, cache sizes, and the draft."""

    pool = forms.ModelChoiceField(Pool.objects.none(), to_field_name="name", empty_label=None)
    window = forms.ChoiceField(choices=WINDOWS, initial="1800", label="Captured traffic")
    draft = forms.BooleanField(required=False, label="The pool's draft")
    strategies = forms.MultipleChoiceField(
        required=False, widget=forms.CheckboxSelectMultiple, label="Strategies, with their default settings"
    )
    replicas = forms.CharField(
        required=False,
        max_length=60,
        label="Numbers of replicas",
        help_text="With the active policy, such as: 3, 6.",
        widget=forms.TextInput({"inputmode": "numeric", "autocomplete": "off"}),
    )
    caches = forms.CharField(
        required=False,
        max_length=60,
        label="Cache per replica, in tokens",
        help_text="With the active policy, such as: 64000, 262144.",
        widget=forms.TextInput({"inputmode": "numeric", "autocomplete": "off"}),
    )

    def __init__(self, *args: Any, pools: Any, active: dict[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        field = self.fields["pool"]
        if isinstance(field, forms.ModelChoiceField):
            field.queryset = pools
        self.fields["strategies"].choices = [  # type: ignore[attr-defined]
            (info.name, f"{info.name}: {info.help}{_active_words(info.name, active)}") for info in policy_catalogue()
        ]

    def clean_replicas(self) -> list[int]:
        return _numbers(self.cleaned_data["replicas"])

    def clean_caches(self) -> list[int]:
        return _numbers(self.cleaned_data["caches"])

    def clean(self) -> dict[str, Any]:
        """Collect the candidates."""
        values: dict[str, Any] = super().clean() or {}
        if self.errors:
            return values
        active = _active_settings(values["pool"])
        candidates = [
            {"name": name, "settings": {"strategy": name}}
            for name in values["strategies"]
            if not (active and are_equal_settings({"strategy": name}, active))
        ]
        candidates += [{"name": f"{number} replicas", "replicas": number} for number in values["replicas"]]
        candidates += [{"name": f"cache of {number} tokens", "cache_tokens": number} for number in values["caches"]]
        if values["draft"]:
            candidates.insert(0, self._draft(values["pool"]))
        if values["strategies"] and not candidates:
            text = "This is the active policy, which is always replayed. Choose another strategy."
            raise forms.ValidationError({"strategies": text})
        if not 1 <= len(candidates) <= MAX_CANDIDATES:
            raise forms.ValidationError(f"Choose 1 to {MAX_CANDIDATES} candidates.")
        return {**values, "candidates": candidates}

    def _draft(self, pool: Pool) -> dict[str, Any]:
        draft = RoutingPolicy.objects.get(pool=pool, group=None).draft()
        if draft is None:
            raise forms.ValidationError({"draft": "The policy of this pool has no draft."})
        return candidate_of_draft(draft)


def _active_settings(pool: Pool) -> dict[str, Any]:
    """The settings of the pool's active policy; {} without one."""
    live = RoutingPolicy.objects.get(pool=pool, group=None).live()
    return live.settings if live else {}


def _active_words(strategy: str, active: dict[str, Any]) -> str:
    is_active = bool(active) and are_equal_settings({"strategy": strategy}, active)
    return " (the active policy: always replayed)" if is_active else ""


def _numbers(text: str) -> list[int]:
    numbers = []
    for part in text.replace(",", " ").split():
        if not (part.isascii() and part.isdigit() and len(part) < 11):
            raise forms.ValidationError("Enter whole numbers, separated by commas.")
        numbers.append(int(part))
    return numbers


@require_http_methods(["GET", "POST"])
def what_if_list(request: HttpRequest) -> HttpResponse:
    """The latest what-ifs, and a form for a new one."""
    pools = manageable(request, Pool.objects.all())
    initial: dict[str, Any] = {name: request.GET[name] for name in ("pool", "draft") if name in request.GET}
    pool = pools.filter(name=initial["pool"]).first() if "pool" in initial else pools.first()
    active = _active_settings(pool) if pool else {}
    initial["strategies"] = request.GET.getlist("strategies")  # that a recommendation names
    form = WhatIfForm(request.POST or None, pools=pools, active=active, initial=initial)
    if form.is_valid():
        values = form.cleaned_data
        with form.service_errors():
            created = _create(request, values)
            return redirect("telemetry:what-if", created.pk)
    rows = viewable(request, WhatIf.objects.select_related("pool", "created_by").defer("result"))[:LISTED]
    context = {"form": form, "rows": rows, "can_create": pools.exists()}
    return render(request, "telemetry/what_ifs.html", context, status=422 if form.errors else 200)


def _create(request: HttpRequest, values: dict[str, Any]) -> WhatIf:
    end = timezone.now()
    start = end - timedelta(seconds=int(values["window"]))
    return create_what_if(values["pool"], values["candidates"], start=start, end=end, by=current_user(request))


@require_GET
def what_if_page(request: HttpRequest, what_if_id: int) -> HttpResponse:
    """One what-if: its progress, or its figures."""
    what_if = _what_if(request, what_if_id)
    result, rows = what_if.result or {}, ranked_rows(what_if)
    context = {
        "what_if": what_if,
        "result": result,
        "rows": [(row, _draft_action(what_if, row)) for row in rows],
        "best": next((row for row in rows[2:3] if row.rank[0] == 0), None),
        "charts": charts_of(what_if, rows) if result else [],
        "groups": [
            (name, [(row.name, row.groups.get(name)) for row in rows[1:]])
            for name, _ in sorted(rows[1].groups.items() if rows else (), key=lambda pair: -pair[1]["requests"])
        ],
        "is_sweep": is_sweep(what_if.candidates),
        "counted_from": datetime.fromisoformat(result["counted_from"]) if result else None,
    }
    return render_live(request, "telemetry/what_if.html", context)


def _draft_action(what_if: WhatIf, row: Row) -> dict[str, Any] | None:
    """What the button of a candidate does; None if it has none."""
    target = draft_target(what_if, row.number) if row.verdict and row.figures else None
    if target is None:
        return None
    group, settings = target
    policy = RoutingPolicy.objects.filter(pool=what_if.pool, group__name=group).first()
    draft = policy.draft() if policy else None
    is_draft = draft is not None and are_equal_settings(settings, draft.settings)
    return {"policy": policy, "draft": draft, "is_draft": is_draft} if policy else None


@require_http_methods(["GET", "POST"])
def what_if_draft(request: HttpRequest, policy_id: int) -> HttpResponse:
    """The prediction for a policy's draft, as a part of the policy's page; POST asks for one."""
    policies = viewable(request, RoutingPolicy.objects.select_related("pool", "group"))
    policy = get_object_or_404(policies, pk=policy_id)
    draft = policy.draft()
    if draft is None:
        return HttpResponse(status=204)
    draft.policy = policy
    error = ""
    if request.method == "POST":
        try:
            create_what_if(policy.pool, [candidate_of_draft(draft)], by=current_user(request))
        except ControlPlaneError as failure:
            error = str(failure)
    what_if, number = next(what_ifs_of_settings(draft), (None, 0))
    doubt = doubt_about(draft)
    rows = rows_of(what_if) if what_if else []
    context = {
        "policy": policy,
        "what_if": what_if,
        "compared": [("Now, replayed", rows[1]), ("This draft", rows[number + 2])] if rows else [],
        "row": rows[number + 2] if rows else None,
        "error": error,
        "doubt": doubt,
        "finding": finding_in(doubt, policy.pool),
        "publish_form": PublishForm(draft),
    }
    return render(request, "telemetry/what_if_draft.html", context)


@require_POST
def what_if_make_draft(request: HttpRequest, what_if_id: int, number: int) -> HttpResponse:
    """Make a candidate the draft of its policy, and show it there."""
    page, key = "telemetry:what-if", what_if_id
    with errors_as_messages(request):
        what_if, seen = get_object_or_404(WhatIf, pk=what_if_id), request.POST.get("draft", "")
        draft = make_draft(what_if, number, seen=seen, by=current_user(request))
        messages.success(request, f"Draft {draft.number} has the settings of the candidate. No router uses it yet.")
        page, key = "controlplane:policy", draft.policy_id
    return redirect(page, key)


@require_POST
def what_if_cancel(request: HttpRequest, what_if_id: int) -> HttpResponse:
    """Cancel a what-if that is queued or running."""
    with errors_as_messages(request):
        cancel_what_if(get_object_or_404(WhatIf, pk=what_if_id).pk)
        messages.success(request, "The what-if was cancelled.")
    return redirect("telemetry:what-if", what_if_id)


def _what_if(request: HttpRequest, what_if_id: int) -> WhatIf:
    return get_object_or_404(viewable(request, WhatIf.objects.select_related("pool", "created_by")), pk=what_if_id)
