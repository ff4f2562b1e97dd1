"""Policies: what runs, the draft, the diff, publishing, and watching routers acknowledge."""

from __future__ import annotations

from typing import Any

from django.contrib import messages
from django.db.models import Prefetch
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.database.transactions import repeatable_read
from controlplane.errors import ControlPlaneError
from controlplane.models import PolicyRevision, Pool, RevisionState, Rollout, RolloutState, RoutingPolicy, TaskGroup
from controlplane.schema_fields import SettingInfo
from controlplane.services.impact.compare import current_fleet, effects_of_settings, warnings_of_settings
from controlplane.services.policies.lifecycle import (
    create_policy,
    discard_draft,
    publish_revision,
    remove_policy,
    save_draft,
)
from controlplane.services.policies.rollout_plans import RolloutPlan
from controlplane.services.policies.settings import (
    StrategyInfo,
    canonical_settings,
    diff_settings,
    policy_catalogue,
    strategy_document,
)
from controlplane.web.base import errors_as_messages, mine, signed_in
from controlplane.web.convergence import Convergence, convergence
from controlplane.web.forms.base import SettingsForm, range_text, strategy_named
from controlplane.web.forms.policies import PublishForm

HISTORY = 6  # revisions on a policy's page; all of them have a page of their own


@require_GET
def policy_list(request: HttpRequest) -> HttpResponse:
    """Every pool with its policy, and its task groups with theirs."""
    current = PolicyRevision.objects.exclude(state__in=(RevisionState.RETIRED, RevisionState.WITHDRAWN)).select_related(
        "author"
    )
    policies = RoutingPolicy.objects.prefetch_related(Prefetch("revisions", current, to_attr="current"))
    pools = mine(request, Pool.objects.all()).prefetch_related(
        Prefetch("policies", policies.filter(group=None), to_attr="own"),
        Prefetch("groups", TaskGroup.objects.order_by("name").prefetch_related(Prefetch("policy", policies))),
    )
    with repeatable_read():
        rows = [_pool_rows(pool) for pool in pools]
    return render(request, "controlplane/policies.html", {"pools": rows})


@require_GET
def policy_detail(request: HttpRequest, policy_id: int) -> HttpResponse:
    """One policy: what runs, the draft if there is one, the routers, the history."""
    policy = _policy(policy_id)
    return render(request, "controlplane/policy.html", _facts(policy))


@require_GET
@never_cache
def policy_rollout(request: HttpRequest, policy_id: int) -> HttpResponse:
    """The routers' part of a policy's page, asked for again while a change is on its way."""
    return render(request, "controlplane/policy_rollout.html", _rollout(_policy(policy_id)))


@require_http_methods(["GET", "POST"])
def policy_edit(request: HttpRequest, policy_id: int) -> HttpResponse:
    """Choose a strategy, fill in its settings, save as the draft. Nothing reaches a router."""
    policy = _policy(policy_id)
    live, draft = policy.live(), policy.draft()
    base = draft or live
    strategy = strategy_named(request.GET.get("strategy", base.strategy if base else "")) or policy_catalogue()[0]
    initial = {"based_on": live.number if live else None, **_starting_values(strategy, base)}
    form = SettingsForm(strategy, request.POST or None, initial=initial)
    if request.method == "POST" and form.is_valid() and _saved(request, policy, form):
        return redirect("controlplane:policy", policy_id=policy.pk)
    context = {
        "policy": policy,
        "live": live,
        "draft": draft,
        "form": form,
        "strategy": strategy,
        "document": strategy_document(strategy.name),
        "catalogue": policy_catalogue(),
        **_meanwhile(policy, form, live),
    }
    return render(request, "controlplane/policy_edit.html", context, status=422 if form.errors else 200)


@require_POST
@never_cache
def policy_check(request: HttpRequest, policy_id: int) -> HttpResponse:
    """What saving would change, or what is wrong, while the form is being filled in. Writes nothing."""
    policy = _policy(policy_id)
    strategy = strategy_named(request.GET.get("strategy", "")) or policy_catalogue()[0]
    form, live = SettingsForm(strategy, request.POST), policy.live()
    context: dict[str, Any] = {"form": form, "live": live}
    if form.is_valid():
        context |= _judged(policy, live, canonical_settings(form.settings()))
    return render(request, "controlplane/policy_check.html", context)


@require_POST
def policy_publish(request: HttpRequest, policy_id: int, revision_id: int) -> HttpResponse:
    """Make the draft the live revision, with a reason."""
    policy = _policy(policy_id)
    form = PublishForm(policy, request.POST, comparable=policy.live() is not None)
    plan = _planned(form)
    if plan is None:
        return render(request, "controlplane/policy.html", {**_facts(policy), "publish_form": form}, status=422)
    revision = get_object_or_404(policy.revisions, pk=revision_id)
    with errors_as_messages(request):
        rollout = publish_revision(
            revision.pk,
            by=signed_in(request),
            reason=form.cleaned_data["reason"],
            expected_digest=form.cleaned_data["digest"] or None,
            plan=plan,
        )
        messages.success(request, f"Revision {rollout.revision.number} {_what_follows(rollout)}")
        if plan.stages or rollout.state == RolloutState.AWAITING_APPROVAL:
            return redirect("controlplane:rollout", rollout_id=rollout.pk)
    return redirect("controlplane:policy", policy_id=policy.pk)


@require_POST
def policy_discard(request: HttpRequest, policy_id: int) -> HttpResponse:
    """Throw the draft away."""
    policy = _policy(policy_id)
    with errors_as_messages(request):
        discard_draft(policy)
        messages.success(request, "The draft was discarded. What runs did not change.")
    return redirect("controlplane:policy", policy_id=policy.pk)


@require_POST
def policy_create(request: HttpRequest, group_id: int) -> HttpResponse:
    """Give a task group a policy of its own; the pool's serves it until the first revision is published."""
    group = get_object_or_404(TaskGroup.objects.select_related("pool"), pk=group_id)
    with errors_as_messages(request):
        create_policy(group.pool, group)
    policy = RoutingPolicy.objects.filter(group=group).first()
    return redirect("controlplane:policy-edit", policy.pk) if policy else redirect("controlplane:policies")


@require_http_methods(["GET", "POST"])
def policy_remove(request: HttpRequest, policy_id: int) -> HttpResponse:
    """Take a group's own policy away, after saying what will happen."""
    policy = _policy(policy_id)
    if request.method == "POST":
        with errors_as_messages(request):
            remove_policy(policy, by=signed_in(request))
            messages.success(request, f"Policy {policy.name} was removed.")
        return redirect("controlplane:policies")
    context = {
        "title": f"Remove policy {policy.name}",
        "text": "The pool's policy places the group's requests from then on. The group stays, and so does its history "
        "in the events.",
        "action": "Use the pool's policy",
        "danger": True,
        "back": reverse("controlplane:policy", args=[policy.pk]),
    }
    return render(request, "controlplane/confirm.html", context)


def _policy(policy_id: int) -> RoutingPolicy:
    return get_object_or_404(RoutingPolicy.objects.select_related("pool__project", "group"), pk=policy_id)


def _pool_rows(pool: Pool) -> dict[str, Any]:
    own = pool.own[0]  # type: ignore[attr-defined]  # prefetched above
    groups = [_row(group, getattr(group, "policy", None)) for group in pool.groups.all()]
    return {"pool": pool, "rows": [_row(None, own), *groups]}


def _row(group: TaskGroup | None, policy: RoutingPolicy | None) -> dict[str, Any]:
    states = {revision.state: revision for revision in policy.current} if policy else {}  # type: ignore[attr-defined]
    return {
        "group": group,
        "policy": policy,
        "live": states.get(RevisionState.LIVE),
        "draft": states.get(RevisionState.DRAFT),
    }


def _facts(policy: RoutingPolicy) -> dict[str, Any]:
    """What a policy's page shows; as many queries whatever the history's length."""
    history = list(policy.revisions.select_related("author").order_by("-number")[:HISTORY])
    live = next((one for one in history if one.state == RevisionState.LIVE), None) or policy.live()
    draft = next((one for one in history if one.state == RevisionState.DRAFT), None)
    return {
        "policy": policy,
        "live": live,
        "live_help": strategy_named(live.strategy) if live else None,
        "live_settings": _shown_settings(live) if live else [],
        "draft": draft,
        "publish_form": _publish_form(policy, live, draft) if draft else None,
        "history": history,
        **(_judged(policy, live, draft.settings) if draft else {}),
        **_rollout(policy),
    }


def _planned(form: PublishForm) -> RolloutPlan | None:
    """The plan that was filled in; None, with the reason on the form, where it cannot be."""
    if not form.is_valid():
        return None
    try:
        return form.rollout_plan()
    except ControlPlaneError as error:
        form.refuse(error)
        return None


def _what_follows(rollout: Rollout) -> str:
    if rollout.state == RolloutState.AWAITING_APPROVAL:
        return "waits for somebody else's approval."
    return "is on trial." if rollout.stages else "is live and on its way to the routers."


def _publish_form(policy: RoutingPolicy, live: PolicyRevision | None, draft: PolicyRevision) -> PublishForm:
    start = {"reason": draft.reason, "digest": draft.digest}
    return PublishForm(policy, initial=start, comparable=live is not None)


def _judged(policy: RoutingPolicy, live: PolicyRevision | None, settings: dict[str, Any]) -> dict[str, Any]:
    """What settings say and do instead of what runs, and what to look at first."""
    fleet, before = current_fleet(), live.settings if live else None
    return {
        "changes": diff_settings(before, settings),
        "effects": effects_of_settings(policy, before, settings, fleet=fleet),
        "warnings": warnings_of_settings(policy, settings, fleet=fleet),
    }


def _rollout(policy: RoutingPolicy) -> dict[str, Any]:
    state: Convergence = convergence()
    rollouts = Rollout.objects.filter(revision__policy=policy).select_related("revision", "snapshot", "started_by")
    return {"policy": policy, "convergence": state, "rollout": rollouts.defer("snapshot__encrypted").first()}


def _shown_settings(revision: PolicyRevision) -> list[dict[str, Any]]:
    strategy = strategy_named(revision.strategy)
    return [_shown(info, revision.settings) for info in strategy.settings] if strategy else []


def _shown(info: SettingInfo, settings: dict[str, Any]) -> dict[str, Any]:
    value = settings.get(info.field, info.default)
    return {"info": info, "value": value, "range": range_text(info), "is_default": value == info.default}


def _starting_values(strategy: StrategyInfo, base: PolicyRevision | None) -> dict[str, Any]:
    """The values a form starts from: those of the base where it knows the setting, else the defaults."""
    known = base.settings if base else {}
    return {info.field: known.get(info.field, info.default) for info in strategy.settings}


def _meanwhile(policy: RoutingPolicy, form: SettingsForm, live: PolicyRevision | None) -> dict[str, Any]:
    """What somebody else published while the form was being filled in; the next save is over their revision."""
    based_on = form.cleaned_data.get("based_on") if form.is_bound else None
    if live is None or based_on is None or based_on == live.number:
        return {}
    form.rebase(live.number)
    seen = policy.revisions.filter(number=based_on).first()
    return {"theirs": live, "their_changes": diff_settings(seen.settings if seen else None, live.settings)}


def _saved(request: HttpRequest, policy: RoutingPolicy, form: SettingsForm) -> bool:
    """Save the draft; False, with the reason on the form, when the service refuses."""
    try:
        save_draft(policy, form.settings(), by=signed_in(request), based_on=form.cleaned_data["based_on"])
    except ControlPlaneError as error:
        form.refuse(error)
        return False
    return True
