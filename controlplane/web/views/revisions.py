"""A policy's revisions: the history, any two beside each other, and back to an earlier one.

Everything that routers were ever told to run: the whole fleet's configurations, numbered.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from django.contrib import messages
from django.db.models import QuerySet
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods

from controlplane.errors import ConflictError, ControlPlaneError
from controlplane.models import ConfigSnapshot, PolicyRevision, RevisionState, RolloutState, Router, RoutingPolicy
from controlplane.services.impact.compare import effects_of_configurations, effects_of_revisions
from controlplane.services.policies.lifecycle import filter_revisions, revert_policy
from controlplane.services.policies.settings import diff_settings, policy_catalogue
from controlplane.web.base import signed_in
from controlplane.web.forms.policies import RevertForm
from controlplane.web.tables import int_parameter

PAGE = 25
FILTERS = ("state", "author", "strategy")  # as over REST


@require_GET
def revision_list(request: HttpRequest, policy_id: int) -> HttpResponse:
    """A page of the history, newest first, narrowed as asked."""
    policy = _policy(policy_id)
    asked = {name: request.GET.get(name, "") for name in FILTERS}
    rows = filter_revisions(policy.revisions.select_related("author").order_by("-number"), **asked)
    before = int_parameter(request, "before")
    page = list((rows.filter(number__lt=before) if before else rows)[: PAGE + 1])
    shown, live = page[:PAGE], policy.live()
    context = {
        "policy": policy,
        "live": live,
        "revisions": shown,
        "more": shown[-1].number if len(page) > PAGE else None,
        "later": bool(before),
        "states": RevisionState.choices,
        "strategies": [info.name for info in policy_catalogue()],
        "authors": _authors(policy),
        "asked": asked,
        "filtered": any(asked.values()) or bool(before),
        "offered": _offered(shown, live),
    }
    return render(request, "controlplane/revisions.html", context)


@require_GET
def revision_compare(request: HttpRequest, policy_id: int) -> HttpResponse:
    """What one revision says and does instead of another, in the fleet as it is now."""
    policy = _policy(policy_id)
    before, after = (_numbered(policy, int_parameter(request, name)) for name in ("from", "to"))
    context: dict[str, Any] = {
        "policy": policy,
        "before": before,
        "after": after,
        "live": policy.live(),
        "numbers": policy.revisions.order_by("-number").values_list("number", flat=True)[:200],
    }
    if before and after:
        context["changes"] = diff_settings(before.settings, after.settings)
        context["effects"] = effects_of_revisions(before, after)
    return render(request, "controlplane/revision_compare.html", context)


@require_http_methods(["GET", "POST"])
def policy_revert(request: HttpRequest, policy_id: int, number: int) -> HttpResponse:
    """Say what going back does, and do it once the policy's name was typed."""
    policy = _policy(policy_id)
    earlier = _numbered(policy, number)
    if earlier is None or earlier.state == RevisionState.DRAFT:
        raise Http404
    live = policy.live()
    form = RevertForm(policy.name, request.POST or None, initial={"live": live.number if live else None})
    if request.method == "POST" and form.is_valid() and _reverted(request, policy, number, form):
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


def _reverted(request: HttpRequest, policy: RoutingPolicy, number: int, form: RevertForm) -> bool:
    """Publish the copy; False, with the reason on the form, when the service refuses."""
    try:
        rollout = revert_policy(
            policy,
            number,
            by=signed_in(request),
            reason=form.cleaned_data["reason"],
            expected_live=form.cleaned_data["live"],
        )
    except ControlPlaneError as error:
        form.refuse(error)
        return False
    told = f"Revision {rollout.revision.number} says what revision {number} said"
    if rollout.state in {RolloutState.PENDING, RolloutState.PROGRESSING, RolloutState.COMPLETE}:
        messages.success(request, f"{told}, and is on its way to the routers.")
    else:
        messages.success(request, f"{told}; its rollout is {rollout.get_state_display().lower()}.")
    return True


def _policy(policy_id: int) -> RoutingPolicy:
    return get_object_or_404(RoutingPolicy.objects.select_related("pool__project", "group"), pk=policy_id)


def _numbered(policy: RoutingPolicy, number: int | None) -> PolicyRevision | None:
    """One of the policy's revisions; None where none was asked for, Http404 for a number that it never had."""
    if number is None:
        return None
    rows = policy.revisions.select_related("author", "policy__pool", "policy__group")
    return get_object_or_404(rows, number=number)


def _authors(policy: RoutingPolicy) -> list[str]:
    """Who wrote any of its revisions."""
    names = (
        policy.revisions.exclude(author=None).order_by("author__username").values_list("author__username", flat=True)
    )
    return list(names.distinct())


def _offered(shown: list[PolicyRevision], live: PolicyRevision | None) -> tuple[int | None, int | None]:
    """The two that are chosen already: the live one, and the one before it on the page."""
    numbers = [revision.number for revision in shown]
    after = live.number if live and live.number in numbers else numbers[0] if numbers else None
    before = next((number for number in numbers if after is not None and number < after), after)
    return before, after


@require_GET
@never_cache
def configuration_list(request: HttpRequest) -> HttpResponse:
    """A page of configurations, newest first, and which routers run each."""
    rows, before = _plain(), int_parameter(request, "before")
    page = list((rows.filter(number__lt=before) if before else rows)[: PAGE + 1])
    running = _running()
    newest = rows.first()
    context = {
        "rows": [(row, running.get((row.number, row.sha256), [])) for row in page[:PAGE]],
        "newest": newest,
        "more": page[PAGE - 1].number if len(page) > PAGE else None,
        "later": bool(before),
        "strangers": _strangers(running),
    }
    return render(request, "controlplane/configurations.html", context)


@require_GET
def configuration_detail(request: HttpRequest, number: int) -> HttpResponse:
    """One configuration: why there is one, what it does instead of the one before, who runs it."""
    row = get_object_or_404(_plain(), number=number)
    former = _plain().filter(number__lt=number).first()
    context = {
        "one": row,
        "former": former,
        "next": _plain().filter(number__gt=number).order_by("number").first(),
        "routers": _running().get((row.number, row.sha256), []),
        **_effects(former, row),
    }
    return render(request, "controlplane/configuration.html", context)


@require_GET
def configuration_compare(request: HttpRequest) -> HttpResponse:
    """What one configuration does instead of another."""
    numbers = [int_parameter(request, name) for name in ("from", "to")]
    before, after = (get_object_or_404(_plain(), number=number) if number else None for number in numbers)
    context: dict[str, Any] = {"before": before, "after": after}
    if before and after:
        context |= _effects(before, after)
    return render(request, "controlplane/configuration_compare.html", context)


def _plain() -> QuerySet[ConfigSnapshot]:
    """Configurations, newest first, without the two columns that are as large as the fleet."""
    return ConfigSnapshot.objects.defer("encrypted", "document").select_related("created_by").order_by("-number")


def _effects(before: ConfigSnapshot | None, after: ConfigSnapshot) -> dict[str, Any]:
    """What changed; ``unreadable`` says why nobody can tell any more."""
    if before is None:
        return {"effects": [], "unreadable": ""}
    try:
        return {"effects": effects_of_configurations(before, after), "unreadable": ""}
    except ConflictError as error:
        return {"effects": [], "unreadable": str(error)}


def _running() -> dict[tuple[int, str], list[Router]]:
    """Routers by what they run, as far as they told."""
    found: dict[tuple[int, str], list[Router]] = defaultdict(list)
    for router in Router.objects.exclude(running_number=None).order_by("name"):
        found[router.running_number or 0, router.running_sha256].append(router)
    return found


def _strangers(running: dict[tuple[int, str], list[Router]]) -> list[Router]:
    """Routers that run a configuration which is none of ours."""
    ours = set(
        ConfigSnapshot.objects.filter(number__in=[number for number, _ in running]).values_list("number", "sha256")
    )
    return [router for key, routers in running.items() if key not in ours for router in routers]
