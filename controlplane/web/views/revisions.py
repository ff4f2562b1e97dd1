"""Revisions of a policy and configurations of the fleet: history, comparison and revert."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.contrib import messages
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods

from controlplane.errors import ConflictError
from controlplane.models import ConfigSnapshot, PolicyRevision, RevisionState, RolloutState, Router, RoutingPolicy
from controlplane.services.impact import effects_of_configurations, effects_of_revisions
from controlplane.services.policies.lifecycle import filter_revisions, revert_policy
from controlplane.services.policies.settings import diff_settings, policy_catalogue
from controlplane.web.base import current_user, first_page, int_parameter
from controlplane.web.forms.policies import RevertForm
from controlplane.web.views.policies import get_policy

PAGE = 25
FILTERS = ("state", "author", "strategy")  # as over REST
DELIVERED = {RolloutState.PENDING, RolloutState.PROGRESSING, RolloutState.COMPLETE}


@require_GET
def revision_list(request: HttpRequest, policy_id: int) -> HttpResponse:
    """A page of revisions that match the filters, newest first."""
    policy = get_policy(policy_id)
    filters = {name: request.GET.get(name, "") for name in FILTERS}
    rows = filter_revisions(policy.revisions.select_related("author").order_by("-number"), **filters)
    before, live = int_parameter(request, "before"), policy.live()
    page, last = first_page(rows.filter(number__lt=before) if before else rows, PAGE)
    authors = policy.revisions.exclude(author=None).order_by("author__username")
    context = {
        "policy": policy,
        "live": live,
        "revisions": page,
        "older_cursor": last and last.number,
        "has_newer": bool(before),
        "states": RevisionState.choices,
        "strategies": [info.name for info in policy_catalogue()],
        "authors": authors.values_list("author__username", flat=True).distinct(),
        "filters": filters,
        "filtered": any(filters.values()) or bool(before),
        "offered": _preselected([revision.number for revision in page], live),
    }
    return render(request, "controlplane/revisions.html", context)


def _preselected(numbers: list[int], live: PolicyRevision | None) -> tuple[int | None, int | None]:
    """The two revisions to compare unless the user selects others: the active one, and the one before it."""
    after = live.number if live and live.number in numbers else next(iter(numbers), None)
    before = next((number for number in numbers if after is not None and number < after), after)
    return before, after


@require_GET
def revision_compare(request: HttpRequest, policy_id: int) -> HttpResponse:
    """Compare two revisions: their settings, and their effects in the current fleet."""
    policy = get_policy(policy_id)
    before, after = (_revision(policy, int_parameter(request, name)) for name in ("from", "to"))
    live, numbers = policy.live(), list(policy.revisions.order_by("-number").values_list("number", flat=True)[:200])
    context: dict[str, Any] = {
        "policy": policy,
        "before": before,
        "after": after,
        "live": live,
        "numbers": numbers,
        "offered": (before.number, after.number) if before and after else _preselected(numbers, live),
    }
    if before and after:
        context["changes"] = diff_settings(before.settings, after.settings)
        context["effects"] = effects_of_revisions(before, after)
    return render(request, "controlplane/revision_compare.html", context)


@require_http_methods(["GET", "POST"])
def policy_revert(request: HttpRequest, policy_id: int, number: int) -> HttpResponse:
    """Publish a copy of an earlier revision. ``?reason=`` fills in the reason, such as that of an alert."""
    policy = get_policy(policy_id)
    earlier = _revision(policy, number)
    if earlier is None or earlier.state == RevisionState.DRAFT:
        raise Http404
    live = policy.live()
    initial = {"live": live.number if live else None, "reason": request.GET.get("reason", "")}
    form = RevertForm(earlier, request.POST or None, initial=initial)
    if form.is_valid():
        with form.service_errors():
            reason, expected = form.cleaned_data["reason"], form.cleaned_data["live"]
            rollout = revert_policy(
                policy,
                number,
                by=current_user(request),
                reason=reason,
                expected_live=expected,
                confirm_faulted=form.cleaned_data.get("confirm_faulted", False),
            )
            state = rollout.get_state_display().lower()
            delivery = "It is being sent to the routers." if rollout.state in DELIVERED else f"Its rollout is {state}."
            created = rollout.revision.number
            messages.success(request, f"Revision {created} has the settings of revision {number}. {delivery}")
            return redirect("controlplane:policy", policy_id=policy.pk)
    context = {
        "policy": policy,
        "live": live,
        "earlier": earlier,
        "draft": policy.draft(),
        "form": form,
        "changes": diff_settings(live.settings, earlier.settings) if live else [],
        "effects": effects_of_revisions(live, earlier) if live else [],
    }
    return render(request, "controlplane/policy_revert.html", context, status=422 if form.errors else 200)


def _revision(policy: RoutingPolicy, number: int | None) -> PolicyRevision | None:
    """One of the policy's revisions; None without a number, Http404 for an unknown number."""
    if number is None:
        return None
    return get_object_or_404(policy.revisions.select_related("author", "policy__pool", "policy__group"), number=number)


@require_GET
@never_cache
def configuration_list(request: HttpRequest) -> HttpResponse:
    """A page of configurations, newest first, and the routers that run each."""
    rows, before, running = _configurations(), int_parameter(request, "before"), _running()
    page, last = first_page(rows.filter(number__lt=before) if before else rows, PAGE)
    context = {
        "rows": [(row, running.get((row.number, row.sha256), [])) for row in page],
        "newest": rows.first(),
        "older_cursor": last and last.number,
        "has_newer": bool(before),
        "unknown_routers": _routers_with_unknown_configuration(running),
    }
    return render(request, "controlplane/configurations.html", context)


@require_GET
def configuration_detail(request: HttpRequest, number: int) -> HttpResponse:
    """One configuration: its reason, its effects compared with the previous one, and the routers that run it."""
    row = get_object_or_404(_configurations(), number=number)
    previous = _configurations().filter(number__lt=number).first()
    context = {
        "configuration": row,
        "previous": previous,
        "next": _configurations().filter(number__gt=number).order_by("number").first(),
        "routers": _running().get((row.number, row.sha256), []),
        **_effects(previous, row),
    }
    return render(request, "controlplane/configuration.html", context)


@require_GET
def configuration_compare(request: HttpRequest) -> HttpResponse:
    """Compare the effects of two configurations."""
    numbers = [int_parameter(request, name) for name in ("from", "to")]
    before, after = (get_object_or_404(_configurations(), number=number) if number else None for number in numbers)
    context: dict[str, Any] = {"before": before, "after": after}
    if before and after:
        context |= _effects(before, after)
    return render(request, "controlplane/configuration_compare.html", context)


def _configurations() -> QuerySet[ConfigSnapshot]:
    """Configurations, newest first, without the two large columns."""
    return ConfigSnapshot.objects.defer("encrypted", "document").select_related("created_by").order_by("-number")


def _effects(before: ConfigSnapshot | None, after: ConfigSnapshot) -> dict[str, Any]:
    """What changed; ``unreadable`` says why it is not known."""
    try:
        return {"effects": effects_of_configurations(before, after) if before else [], "unreadable": ""}
    except ConflictError as error:
        return {"effects": [], "unreadable": str(error)}


def _running() -> dict[tuple[int, str], list[Router]]:
    """Routers by the number and digest of the configuration that they report."""
    routers: dict[tuple[int, str], list[Router]] = defaultdict(list)
    for router in Router.objects.exclude(running_number=None).order_by("name"):
        routers[router.running_number or 0, router.running_sha256].append(router)
    return routers


def _routers_with_unknown_configuration(running: dict[tuple[int, str], list[Router]]) -> list[Router]:
    rows = ConfigSnapshot.objects.filter(number__in=[number for number, _ in running])
    known = set(rows.values_list("number", "sha256"))
    return [router for key, routers in running.items() if key not in known for router in routers]
