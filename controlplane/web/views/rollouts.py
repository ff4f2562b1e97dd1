"""Rollouts: progress, analysis of the canary, and the transitions that a user can make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.urls import reverse
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods

from controlplane.models import OPEN_ROLLOUTS, RevisionState, Rollout, RolloutState
from controlplane.schema_fields import SettingInfo
from controlplane.services.policies import rollouts as services
from controlplane.services.policies.rollout_plans import describe_stage, guard_catalogue, read_stage
from controlplane.services.policies.rollout_transitions import BY_USER
from controlplane.services.policies.rollouts import Progress, RouterProgress, router_progress
from controlplane.web.base import current_user, errors_as_messages, first_page, int_parameter, render_live, viewable
from controlplane.web.forms.base import setting_label
from controlplane.web.forms.policies import PLANS, ReasonForm
from controlplane.web.tags import percent, seconds, setting

PAGE = 25


@dataclass(frozen=True, slots=True)
class Action:
    """A transition that a user can make: its button, its consequence and the message afterwards."""

    service: Callable[..., Rollout]
    label: str
    effect: str
    done: str
    danger: bool = False


ACTIONS = {
    "approve": Action(
        services.approve_rollout, "Approve", "Every router receives the first step within seconds.", "approved."
    ),
    "promote": Action(
        services.promote_rollout,
        "Promote to next step",
        "The next step begins now, regardless of the analysis. The last step makes the revision active.",
        "promoted to the next step.",
    ),
    "pause": Action(
        services.pause_rollout,
        "Pause",
        "The canary keeps its current share until somebody resumes the rollout. The analysis continues, and rolls back "
        "if the canary performs worse.",
        "paused.",
    ),
    "resume": Action(
        services.resume_rollout,
        "Resume",
        "The rollout continues with its current step. If that step has ended, the next one begins at once.",
        "resumed.",
    ),
    "abort": Action(
        services.abort_rollout,
        "Abort",
        "The active revision places all requests again within seconds. Running requests are not affected.",
        "aborted.",
        danger=True,
    ),
}


@require_GET
@never_cache
def rollout_list(request: HttpRequest) -> HttpResponse:
    """Rollouts in progress, and a page of finished ones, newest first."""
    rows, before = viewable(request, _rollouts()).defer("past_readings"), int_parameter(request, "before")
    past = rows.exclude(state__in=OPEN_ROLLOUTS).order_by("-pk")
    page, last = first_page(past.filter(pk__lt=before) if before else past, PAGE)
    context = {
        "open": [_line(rollout) for rollout in rows.filter(state__in=OPEN_ROLLOUTS)],
        "past": [_line(rollout) for rollout in page],
        "older_cursor": last and last.pk,
        "has_newer": bool(before),
    }
    return render(request, "controlplane/rollouts.html", context)


@require_GET
@never_cache
def rollout_detail(request: HttpRequest, rollout_id: int) -> HttpResponse:
    """One rollout."""
    return render_live(request, "controlplane/rollout.html", _context(get_object_or_404(_rollouts(), pk=rollout_id)))


@require_http_methods(["GET", "POST"])
def rollout_transition(request: HttpRequest, rollout_id: int, transition: str) -> HttpResponse:
    """Confirm and make a transition."""
    rollout, action, form = (
        get_object_or_404(_rollouts(), pk=rollout_id),
        ACTIONS[transition],
        ReasonForm(request.POST or None),
    )
    if request.method == "GET" and rollout.state not in BY_USER[transition].before:
        messages.warning(
            request, f"{action.label} is not possible: the rollout is {rollout.get_state_display().lower()}."
        )
        return redirect("controlplane:rollout", rollout_id=rollout.pk)
    if request.method == "POST" and (form.is_valid() or not form.is_bound):
        reason = form.cleaned_data["reason"] if form.is_bound else ""
        with errors_as_messages(request):
            action.service(rollout.pk, by=current_user(request), reason=reason)
            messages.success(request, f"The rollout of revision {rollout.revision.number} was {action.done}")
        return redirect("controlplane:rollout", rollout_id=rollout.pk)
    has_next = transition == "promote" and not rollout.is_last_stage
    next_step = f" Next step: {_stage_text(rollout.stages[rollout.stage + 1])}." if has_next else ""
    context = {
        "title": f"{action.label}: revision {rollout.revision.number} of {rollout.revision.policy.name}",
        "text": action.effect + next_step,
        "action": action.label,
        "danger": action.danger,
        "form": form,
        "back": reverse("controlplane:rollout", args=[rollout.pk]),
    }
    return render(request, "controlplane/confirm.html", context, status=422 if form.errors else 200)


def _rollouts() -> QuerySet[Rollout]:
    rows = Rollout.objects.select_related(
        "revision__policy__pool__project", "revision__policy__group", "snapshot", "started_by", "approved_by"
    )
    return rows.defer("snapshot__encrypted", "snapshot__document")


def _stage_text(stage: dict[str, Any]) -> str:
    return describe_stage(read_stage(stage))


def _line(rollout: Rollout) -> dict[str, Any]:
    labels = {str(plan): label for plan, (label, _) in PLANS.items()}
    return {
        "rollout": rollout,
        "scope": _stage_text(rollout.scope) if rollout.scope else "every request",
        "plan": labels.get(rollout.plan, "Custom steps"),
    }


def _context(rollout: Rollout) -> dict[str, Any]:
    """What a rollout's page shows, in five queries."""
    routers, is_canary = router_progress(rollout), rollout.revision.state == RevisionState.CANARY
    history = list(rollout.history.select_related("by").order_by("-pk"))
    due_at = None if rollout.is_last_stage else rollout.stage_ends_at
    is_harmful = bool(rollout.revision.fault) or any(_is_past_limit(reading) for reading in rollout.readings)
    return {
        **_line(rollout),
        "is_canary": is_canary,
        "live": rollout.revision.policy.live(),
        "stages": [_stage(rollout, index) for index in range(len(rollout.stages))],
        "due_at": due_at,
        "due_in_s": max(0, round((due_at - timezone.now()).total_seconds())) if due_at else None,
        "routers": routers,
        "acknowledged": sum(router.progress is Progress.ACKNOWLEDGED for router in routers),
        "waits": _waiting_for(rollout, routers),
        "limits": [_limit(rollout, info) for info in guard_catalogue()] if rollout.guard else [],
        "readings": [_reading(reading) for reading in rollout.readings],
        "unread": _no_readings(rollout),
        "history": history,
        "overridden": next((entry for entry in history if entry.transition == "publish" and entry.evidence), None),
        "actions": [
            (name, action, f"controlplane:rollout-{name}")
            for name, action in sorted(ACTIONS.items(), key=lambda row: not (is_harmful and row[1].danger))
            if is_canary and rollout.state in BY_USER[name].before
        ],
    }


def _stage(rollout: Rollout, index: int) -> dict[str, Any]:
    """One step of the plan: its requests, its duration and its progress."""
    stage = read_stage(rollout.stages[index])
    is_current = index == rollout.stage
    if index < rollout.stage or rollout.state == RolloutState.COMPLETE:
        progress = "done"
    elif is_current and rollout.is_open and rollout.state != RolloutState.AWAITING_APPROVAL:
        progress = "current"
    elif rollout.is_open:
        progress = "upcoming"
    else:
        progress = "ended here" if is_current else "not reached"
    return {
        "words": describe_stage(stage),
        "observe_s": stage.observe_s,
        "ended_after_s": _ended_after_s(rollout) if progress == "ended here" else None,
        "progress": progress,
        "last": stage.covers_all_requests,
    }


def _ended_after_s(rollout: Rollout) -> int | None:
    """How long the step in which a rollout ended had run; None if it did not begin."""
    if rollout.finished_at is None or rollout.stage_since is None:
        return None
    return round((rollout.finished_at - rollout.stage_since).total_seconds())


def _waiting_for(rollout: Rollout, routers: list[RouterProgress]) -> str:
    """What the current step waits for; "" if nothing."""
    present = [router for router in routers if router.progress is not Progress.LOST]
    if not rollout.is_open or rollout.state in {RolloutState.AWAITING_APPROVAL, RolloutState.PAUSED}:
        return ""
    if not present:
        return "No router is connected; the rollout continues when one is."
    if not any(router.gets_canary_requests for router in present):
        return "No router of this step is connected; the rollout continues when one is, or when you promote it."
    if rollout.stage_converged_at is None or rollout.is_last_stage:
        behind = sum(router.progress is not Progress.ACKNOWLEDGED for router in present)
        return f"Waiting for {behind} of {len(present)} routers to acknowledge." if behind else ""
    due_at = rollout.stage_ends_at
    if due_at is not None and timezone.now() >= due_at and rollout.guard is not None:
        return "The step has ended; the rollout continues when the analysis is conclusive, or when you promote it."
    return ""


def _no_readings(rollout: Rollout) -> str:
    """Why the analysis has no results."""
    if rollout.stage_converged_at is None:
        return "The analysis of this step starts when every router runs it."
    if rollout.guard and timezone.now() < rollout.stage_converged_at + timedelta(seconds=rollout.guard["warm_up_s"]):
        return f"Caches warm up first: the analysis starts after {seconds(rollout.guard['warm_up_s'])}."
    return "No result for this step yet."


def _limit(rollout: Rollout, info: SettingInfo) -> dict[str, str]:
    value = (rollout.guard or {}).get(info.field)
    text = "no limit" if value is None else _with_unit(info.unit, value)
    return {"label": setting_label(info), "text": text}


def _is_past_limit(reading: dict[str, Any]) -> bool:
    canary, limit = reading["canary"], reading["limit"]
    return None not in {canary, limit} and (canary < limit if reading["name"] == "hit_rate" else canary > limit)


def _reading(reading: dict[str, Any]) -> dict[str, Any]:
    values = {side: _with_unit(reading["unit"], reading[side]) for side in ("baseline", "canary", "limit")}
    return {**reading, **values, "name": reading["name"].removesuffix("_s")}


def _with_unit(unit: str, value: float | None) -> str:
    if unit == "seconds":
        return seconds(value)
    if value is None or unit != "ratio":
        return setting(round(value, 2) if isinstance(value, float) else value)
    return percent(value)
