"""Routing policies: the active revision, the draft, its impact, publication and delivery to routers."""

from __future__ import annotations

from functools import partial
from typing import Any

from django.contrib import messages
from django.db.models import Prefetch
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from controlplane.database.transactions import repeatable_read
from controlplane.errors import PredictionRequiredError
from controlplane.models import PolicyRevision, Pool, RevisionState, Rollout, RolloutState, RoutingPolicy, TaskGroup
from controlplane.services.impact import current_fleet, effects_of_settings, warnings_of_settings
from controlplane.services.policies.lifecycle import (
    create_policy,
    discard_draft,
    healthy_revisions,
    publish_revision,
    remove_policy,
    save_draft,
)
from controlplane.services.policies.publish_checks import PredictionMode, doubt_about, finding_in, prediction_policy
from controlplane.services.policies.rollout_plans import Plan, RolloutPlan
from controlplane.services.policies.settings import (
    StrategyInfo,
    canonical_settings,
    diff_settings,
    policy_catalogue,
    strategy_document,
)
from controlplane.web.base import confirm_page, current_user, errors_as_messages, render_live, viewable
from controlplane.web.forms.base import SettingsForm, range_text, strategy_named
from controlplane.web.forms.policies import PublishForm
from controlplane.web.views.routers import convergence

HISTORY = 6  # revisions on a policy's page
MOST_PREFIXES = 0.5  # a change that moves more of them is preselected to be gradual


def get_policy(policy_id: int) -> RoutingPolicy:
    """A policy with its pool, project and group; Http404 if there is none."""
    return get_object_or_404(RoutingPolicy.objects.select_related("pool__project", "group"), pk=policy_id)


@require_GET
def policy_list(request: HttpRequest) -> HttpResponse:
    """Every pool with its policy and the policies of its task groups."""
    current = PolicyRevision.objects.exclude(state__in=(RevisionState.RETIRED, RevisionState.ROLLED_BACK))
    revisions = Prefetch("revisions", current.select_related("author"), to_attr="current")
    policies = RoutingPolicy.objects.prefetch_related(revisions)
    pools = viewable(request, Pool.objects.all()).prefetch_related(
        Prefetch("policies", policies.filter(group=None), to_attr="own"),
        Prefetch("groups", TaskGroup.objects.order_by("name").prefetch_related(Prefetch("policy", policies))),
    )
    with repeatable_read():
        rows = [_pool_rows(pool) for pool in pools]
    return render(request, "controlplane/policies.html", {"pools": rows})


def _pool_rows(pool: Pool) -> dict[str, Any]:
    own = pool.own[0]  # type: ignore[attr-defined]  # prefetched above
    groups = [_row(group, getattr(group, "policy", None)) for group in pool.groups.all()]
    return {"pool": pool, "rows": [_row(None, own), *groups]}


def _row(group: TaskGroup | None, policy: RoutingPolicy | None) -> dict[str, Any]:
    states = {revision.state: revision for revision in policy.current} if policy else {}  # type: ignore[attr-defined]
    live, draft = states.get(RevisionState.LIVE), states.get(RevisionState.DRAFT)
    return {"group": group, "policy": policy, "live": live, "draft": draft}


@require_GET
def policy_detail(request: HttpRequest, policy_id: int) -> HttpResponse:
    """One policy: active revision, draft, routers and history."""
    return render_live(request, "controlplane/policy.html", _context(get_policy(policy_id)), partial=False)


@require_GET
@never_cache
def policy_rollout(request: HttpRequest, policy_id: int) -> HttpResponse:
    """The delivery to routers on a policy's page, for a refresh."""
    context = _delivery(get_policy(policy_id))
    return render_live(request, "controlplane/policy.html", context, partial=True)


def _context(policy: RoutingPolicy) -> dict[str, Any]:
    """What a policy's page shows. The number of queries does not depend on the history's length."""
    history = list(policy.revisions.select_related("author").order_by("-number")[:HISTORY])
    live = next((row for row in history if row.state == RevisionState.LIVE), None) or policy.live()
    draft = next((row for row in history if row.state == RevisionState.DRAFT), None)
    strategy = strategy_named(live.strategy) if live else None
    context = {
        "policy": policy,
        "live": live,
        "live_help": strategy,
        "live_settings": _setting_rows(strategy, live.settings) if live and strategy else [],
        "previous": healthy_revisions().filter(policy=policy).first() if live else None,
        "draft": draft,
        "history": history,
        **_delivery(policy),
    }
    if draft:
        draft.policy = policy
        context |= _impact(policy, live, draft.settings)
        doubt = doubt_about(draft)
        moved = max((effect.moved_ratio or 0.0 for effect in context["effects"]), default=0.0)
        context |= {"doubt": doubt, "finding": finding_in(doubt, policy.pool), "moved": moved}
        context["moves_most"] = live is not None and moved > MOST_PREFIXES
        gradual = live is not None and (doubt is not None or moved > MOST_PREFIXES)
        plan = Plan.BY_SHARE if gradual else Plan.ALL_AT_ONCE
        initial = {"reason": draft.reason, "digest": draft.digest, "plan": plan}
        context["publish_form"] = PublishForm(draft, initial=initial, comparable=live is not None)
        context["predicts"] = prediction_policy(policy.pool).mode is not PredictionMode.OFF
    return context


def _delivery(policy: RoutingPolicy) -> dict[str, Any]:
    rollouts = Rollout.objects.filter(revision__policy=policy).select_related("revision", "snapshot", "started_by")
    rollout = rollouts.defer("snapshot__encrypted").first()
    return {"policy": policy, "convergence": convergence(), "rollout": rollout}


def _impact(policy: RoutingPolicy, live: PolicyRevision | None, settings: dict[str, Any]) -> dict[str, Any]:
    """What settings change compared with the active revision, and warnings about them."""
    fleet, before = current_fleet(), live.settings if live else None
    return {
        "changes": diff_settings(before, settings),
        "effects": effects_of_settings(policy, before, settings, fleet=fleet),
        "warnings": warnings_of_settings(policy, settings, fleet=fleet),
    }


def _setting_rows(strategy: StrategyInfo, settings: dict[str, Any]) -> list[dict[str, Any]]:
    values = [(info, settings.get(info.field, info.default)) for info in strategy.settings]
    return [
        {"info": info, "value": value, "range": range_text(info), "is_default": value == info.default}
        for info, value in values
    ]


@require_http_methods(["GET", "POST"])
def policy_edit(request: HttpRequest, policy_id: int) -> HttpResponse:
    """Edit the draft. Nothing reaches a router."""
    policy = get_policy(policy_id)
    live, draft = policy.live(), policy.draft()
    base = draft or live
    strategy = strategy_named(request.GET.get("strategy", base.strategy if base else "")) or policy_catalogue()[0]
    values = base.settings if base else {}
    initial = {info.field: values.get(info.field, info.default) for info in strategy.settings}
    initial["based_on"] = live.number if live else None
    data, reset = request.POST.copy(), request.POST.get("reset", "")
    if reset:  # an empty field takes its default
        data[reset] = ""
    form = SettingsForm(strategy, data or None, initial=initial).editing(policy)
    if reset in form.fields:
        form.fields[reset].widget.attrs["autofocus"] = True
    if form.is_valid() and not reset:
        with form.service_errors(), form.locked():
            save_draft(policy, form.settings(), by=current_user(request), based_on=form.cleaned_data["based_on"])
            return redirect("controlplane:policy", policy_id=policy.pk)
    context = {
        "policy": policy,
        "live": live,
        "draft": draft,
        "form": form,
        "strategy": strategy,
        "document": strategy_document(strategy.name),
        "catalogue": policy_catalogue(),
        **_concurrent_change(policy, form, live),
        **_checked(policy, form if form.is_bound else SettingsForm(strategy, form.initial), live),
    }
    return render(request, "controlplane/policy_edit.html", context, status=422 if form.errors else 200)


def _concurrent_change(policy: RoutingPolicy, form: SettingsForm, live: PolicyRevision | None) -> dict[str, Any]:
    """What another user published since the form was opened. The next save replaces that revision."""
    based_on = form.cleaned_data.get("based_on") if form.is_bound else None
    if live is None or based_on is None or based_on == live.number:
        return {}
    form.rebase(live.number)
    base = policy.revisions.filter(number=based_on).first()
    return {"theirs": live, "their_changes": diff_settings(base.settings if base else None, live.settings)}


@require_POST
@never_cache
def policy_check(request: HttpRequest, policy_id: int) -> HttpResponse:
    """The errors or the impact of the form as it is filled in, and the marks of its fields. Saves nothing."""
    policy = get_policy(policy_id)
    strategy = strategy_named(request.GET.get("strategy", "")) or policy_catalogue()[0]
    context = _checked(policy, SettingsForm(strategy, request.POST), policy.live())
    return render(request, "controlplane/policy_check.html", context | {"swap": True})


def _checked(policy: RoutingPolicy, form: SettingsForm, live: PolicyRevision | None) -> dict[str, Any]:
    context: dict[str, Any] = {"checked": form, "live": live, "fields": form.compared(live.settings if live else None)}
    if form.is_valid():
        context |= _impact(policy, live, canonical_settings(form.settings()))
    return context


@require_POST
def policy_publish(request: HttpRequest, policy_id: int, revision_id: int) -> HttpResponse:
    """Publish the draft."""
    policy = get_policy(policy_id)
    revision = get_object_or_404(policy.revisions, pk=revision_id)
    revision.policy = policy
    form = PublishForm(revision, request.POST, comparable=policy.live() is not None)
    plan: RolloutPlan | None = None
    if form.is_valid():
        with form.service_errors():
            plan = form.rollout_plan()
    if plan is None:
        context = {**_context(policy), "publish_form": form}
        return render_live(request, "controlplane/policy.html", context, partial=False, status=422)
    with errors_as_messages(request):
        try:
            rollout = publish_revision(
                revision.pk,
                by=current_user(request),
                reason=form.cleaned_data["reason"],
                expected_digest=form.cleaned_data["digest"] or None,
                plan=plan,
                override_reason=form.cleaned_data["override_reason"],
                confirm_faulted=form.cleaned_data.get("confirm_faulted", False),
            )
        except PredictionRequiredError:
            context = {**_context(policy), "publish_form": form, "is_blocked": True}
            return render_live(request, "controlplane/policy.html", context, partial=False, status=409)
        messages.success(request, f"Revision {rollout.revision.number} {_next_step(rollout)}")
        if plan.stages or rollout.state == RolloutState.AWAITING_APPROVAL:
            return redirect("controlplane:rollout", rollout_id=rollout.pk)
    return redirect("controlplane:policy", policy_id=policy.pk)


def _next_step(rollout: Rollout) -> str:
    if rollout.state == RolloutState.AWAITING_APPROVAL:
        return "waits for the approval of a second user."
    return "runs as a canary." if rollout.stages else "is active and is being sent to the routers."


@require_POST
def policy_discard(request: HttpRequest, policy_id: int) -> HttpResponse:
    """Discard the draft."""
    policy = get_policy(policy_id)
    with errors_as_messages(request):
        discard_draft(policy, by=current_user(request))
        messages.success(request, "The draft was discarded. The active revision did not change.")
    return redirect("controlplane:policy", policy_id=policy.pk)


@require_POST
def policy_create(request: HttpRequest, group_id: int) -> HttpResponse:
    """Give a task group its own policy; the pool's applies until its first revision is published."""
    group = get_object_or_404(TaskGroup.objects.select_related("pool"), pk=group_id)
    with errors_as_messages(request):
        create_policy(group.pool, group, by=current_user(request))
    policy = RoutingPolicy.objects.filter(group=group).first()
    return redirect("controlplane:policy-edit", policy.pk) if policy else redirect("controlplane:policies")


@require_http_methods(["GET", "POST"])
def policy_remove(request: HttpRequest, policy_id: int) -> HttpResponse:
    """Remove a task group's own policy."""
    policy = get_policy(policy_id)
    return confirm_page(
        request,
        partial(remove_policy, policy, by=current_user(request)),
        back="controlplane:policies",
        cancel=reverse("controlplane:policy", args=[policy.pk]),
        title=f"Remove policy {policy.name}",
        text="The pool's policy then applies to the group's requests. The group stays, and past events are kept.",
        action="Use the pool's policy",
        done=f"Policy {policy.name} was removed.",
    )
