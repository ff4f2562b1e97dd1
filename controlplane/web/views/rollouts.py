"""Rollouts: which there are, how far each has come, what its guard reads, and what may be done about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from django.contrib import messages
from django.db.models import QuerySet
from django.http import HttpRequest, HttpResponse
from django.shortcuts import get_object_or_404, redirect, render
from django.utils import timezone
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_GET, require_http_methods

from controlplane.models import OPEN_ROLLOUTS, RevisionState, Rollout, RolloutState
from controlplane.services.policies import rollouts as services
from controlplane.services.policies.rollout_plans import describe_stage, guard_catalogue, read_stage
from controlplane.services.policies.rollout_transitions import TRANSITIONS
from controlplane.services.policies.rollouts import Progress, RouterProgress, router_progress
from controlplane.web.base import errors_as_messages, mine, signed_in
from controlplane.web.forms.policies import PLANS, MoveForm
from controlplane.web.tables import int_parameter
from controlplane.web.tags import percent, seconds, setting

PAGE = 25


@dataclass(frozen=True, slots=True)
class MoveText:
    """What a button says, and what happens when it is pressed."""

    service: Callable[..., Rollout]
    label: str
    effect: str
    done: str
    danger: bool = False


MOVE_TEXTS = {
    "approve": MoveText(
        services.approve_rollout, "Approve", "Its first stage goes to every router within seconds.", "It begins."
    ),
    "promote": MoveText(
        services.promote_rollout,
        "Go to the next stage",
        "The next stage begins now, whatever was observed of this one. The last stage puts the revision in force.",
        "The next stage has begun.",
    ),
    "pause": MoveText(
        services.pause_rollout,
        "Pause",
        "The requests that are on trial stay so, and nothing is widened until somebody resumes it. The guard still "
        "watches, and takes the revision back if it does worse.",
        "It goes no further until somebody resumes it.",
    ),
    "resume": MoveText(
        services.resume_rollout,
        "Resume",
        "It goes on where it was. A stage that is over is followed at once.",
        "It goes on.",
    ),
    "abort": MoveText(
        services.abort_rollout,
        "Abort",
        "The revision is withdrawn: within seconds the revision in force places every request again, as it did before. "
        "Running requests are not touched.",
        "The revision was withdrawn.",
        danger=True,
    ),
}


@require_GET
@never_cache
def rollout_list(request: HttpRequest) -> HttpResponse:
    """Those that may still move, and a page of those that ended, newest first."""
    rows, before = mine(request, _rows()), int_parameter(request, "before")
    past = rows.exclude(state__in=OPEN_ROLLOUTS).order_by("-pk")
    page = list((past.filter(pk__lt=before) if before else past)[: PAGE + 1])
    context = {
        "open": [_line(rollout) for rollout in rows.filter(state__in=OPEN_ROLLOUTS)],
        "past": [_line(rollout) for rollout in page[:PAGE]],
        "more": page[PAGE - 1].pk if len(page) > PAGE else None,
        "later": bool(before),
    }
    return render(request, "controlplane/rollouts.html", context)


@require_GET
@never_cache
def rollout_detail(request: HttpRequest, rollout_id: int) -> HttpResponse:
    """One rollout; the live part alone for a refresh."""
    refresh = request.headers.get("HX-Request") == "true"
    context = _facts(get_object_or_404(_rows(), pk=rollout_id))
    return render(request, "controlplane/rollout_live.html" if refresh else "controlplane/rollout.html", context)


@require_http_methods(["GET", "POST"])
def rollout_move(request: HttpRequest, rollout_id: int, move: str) -> HttpResponse:
    """Make a move, after saying what will happen."""
    rollout, text, form = get_object_or_404(_rows(), pk=rollout_id), MOVE_TEXTS[move], MoveForm(request.POST or None)
    if request.method == "POST" and (form.is_valid() or not request.POST):
        reason = form.cleaned_data["reason"] if form.is_bound else ""
        with errors_as_messages(request):
            text.service(rollout.pk, by=signed_in(request), reason=reason)
            messages.success(request, f"Revision {rollout.revision.number}: {text.done}")
        return redirect("controlplane:rollout", rollout_id=rollout.pk)
    context = {
        "rollout": rollout,
        "text": text,
        "form": form,
        "next": _next_stage(rollout) if move == "promote" else "",
    }
    return render(request, "controlplane/rollout_move.html", context, status=422 if form.errors else 200)


def _rows() -> QuerySet[Rollout]:
    rows = Rollout.objects.select_related(
        "revision__policy__pool__project", "revision__policy__group", "snapshot", "started_by", "approved_by"
    )
    return rows.defer("snapshot__encrypted", "snapshot__document")


def _line(rollout: Rollout) -> dict[str, Any]:
    return {"rollout": rollout, "scope": _scope(rollout), "plan": _plan(rollout)}


def _facts(rollout: Rollout) -> dict[str, Any]:
    """What a rollout's page shows; five queries whatever happened to it."""
    routers, on_trial = router_progress(rollout), rollout.revision.state == RevisionState.CANARY
    due_at = _due_at(rollout)
    offered = [(name, text) for name, text in MOVE_TEXTS.items() if _offered(rollout, name)]
    return {
        "rollout": rollout,
        "plan": _plan(rollout),
        "scope": _scope(rollout),
        "on_trial": on_trial,
        "live": rollout.revision.policy.live(),
        "stages": [_stage(rollout, at) for at in range(len(rollout.stages))],
        "due_at": due_at,
        "due_in_s": max(0, round((due_at - timezone.now()).total_seconds())) if due_at else None,
        "routers": routers,
        "acknowledged": sum(router.progress is Progress.ACKNOWLEDGED for router in routers),
        "waits": _waits(rollout, routers),
        "limits": [_limit(rollout, info.field, info.unit) for info in guard_catalogue()] if rollout.guard else [],
        "readings": [_reading(reading) for reading in rollout.readings],
        "unread": _unread(rollout),
        "steps": rollout.steps.select_related("by").order_by("-pk"),
        "moves": [(name, text, f"controlplane:rollout-{name}") for name, text in offered],
    }


def _offered(rollout: Rollout, move: str) -> bool:
    return rollout.state in TRANSITIONS[move].before and rollout.revision.state == RevisionState.CANARY


def _plan(rollout: Rollout) -> str:
    known = {str(plan): label for plan, (label, _) in PLANS.items()}
    return known.get(rollout.plan, "Stages of its own")


def _scope(rollout: Rollout) -> str:
    return describe_stage(read_stage(rollout.scope)) if rollout.scope else "every request"


def _next_stage(rollout: Rollout) -> str:
    if rollout.is_last_stage:
        return ""
    return describe_stage(read_stage(rollout.stages[rollout.stage + 1]))


def _stage(rollout: Rollout, at: int) -> dict[str, Any]:
    """One stage on the line: what it tries, and whether it is done, the present one, or ahead."""
    done = at < rollout.stage or rollout.state == RolloutState.COMPLETE
    now = at == rollout.stage and rollout.is_open and rollout.state != RolloutState.AWAITING_APPROVAL
    stage = read_stage(rollout.stages[at])
    words, last = describe_stage(stage), stage.is_everything
    return {
        "words": words,
        "observe_s": stage.observe_s,
        "done": done,
        "now": now,
        "last": last,
        "here": at == rollout.stage,
    }


def _due_at(rollout: Rollout) -> datetime | None:
    """When the present stage is over, as far as the clock goes; None while that is not known."""
    return None if rollout.is_last_stage else rollout.stage_ends_at


def _waits(rollout: Rollout, routers: list[RouterProgress]) -> str:
    """What the present stage waits for, in a sentence; "" where nothing is waited for."""
    present = [router for router in routers if router.progress is not Progress.LOST]
    if not rollout.is_open or rollout.state in {RolloutState.AWAITING_APPROVAL, RolloutState.PAUSED}:
        return ""
    if not present:
        return "No router is present: it waits for one."
    if not any(router.on_trial for router in present):
        return "None of the routers that this stage names is present: it waits for one, or for a person's decision."
    if rollout.stage_converged_at is None or rollout.is_last_stage:
        behind = sum(router.progress is not Progress.ACKNOWLEDGED for router in present)
        return f"It waits for {behind} of {len(present)} routers to acknowledge." if behind else ""
    due = _due_at(rollout)
    if due is not None and timezone.now() >= due and rollout.guard is not None:
        return "Its time is over: it waits for the guard to be sure."
    return ""


def _unread(rollout: Rollout) -> str:
    """Why there are no readings."""
    if rollout.stage_converged_at is None:
        return "It reads this stage once every router runs it."
    if rollout.guard and timezone.now() < rollout.stage_converged_at + timedelta(seconds=rollout.guard["warm_up_s"]):
        return f"Caches warm up first: it judges after {seconds(rollout.guard['warm_up_s'])}."
    return "It has read nothing of this stage yet."


def _limit(rollout: Rollout, field: str, unit: str) -> dict[str, Any]:
    value = (rollout.guard or {}).get(field)
    return {"field": field, "text": "off" if value is None else _with_unit(field, unit, value)}


def _reading(reading: dict[str, Any]) -> dict[str, Any]:
    sides = ("baseline", "trial", "limit")
    shown = {side: _with_unit(reading["name"], reading["unit"], reading[side]) for side in sides}
    return {**reading, **shown, "name": reading["name"].removesuffix("_s")}


def _with_unit(name: str, unit: str, value: float | None) -> str:
    if unit == "seconds":
        return seconds(value)
    if value is None or unit != "ratio" or "skew" in name:
        return setting(round(value, 2) if isinstance(value, float) else value)
    return percent(value)
