"""The rollout controller: publishes revisions stage by stage, and rolls them back.

Theory of operation. Rows hold all state. ``advance_rollouts`` compares them with acknowledgements and the clock, as
often as it is called and in any number of processes: the second one finds the transition made.

Two things put a rollout on hold: a router that rejects the configuration, until none does; and an analysis that is
inconclusive at the end of a stage, or leaves a figure without a verdict at the end of the last canary stage, until it
is conclusive or a user decides. Only users pause: the canary keeps its requests, the analysis continues and may roll
back, and no stage is entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

import msgspec
from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from controlplane.errors import RolloutTransitionError, SelfApprovalError
from controlplane.isolation import isolated_items
from controlplane.models import (
    ConfigSnapshot,
    EventKind,
    HoldReason,
    PeriodicTask,
    PolicyRevision,
    Rollout,
    Router,
    RoutingPolicy,
)
from controlplane.services.policies.rollout_plans import AT_ONCE, RolloutPlan, read_stage
from controlplane.services.policies.rollout_transitions import (
    AUTOMATIC,
    AWAITING,
    BY_USER,
    HOLDING,
    PENDING,
    PROGRESSING,
    change_state,
    end_rollout,
    enter_next_stage,
    enter_stage,
    hold_rollout,
    is_canary,
    lock_open_rollouts,
    lock_rollout,
    lock_started_rollouts,
    record_rollout_event,
    record_step,
    revision_change,
    scope_text,
)
from controlplane.services.snapshots import freeze_snapshot, newest_snapshot

MAX_PAST_READINGS = 240  # analyses that a rollout keeps for its charts
PAST_FIGURE = ("name", "unit", "baseline", "canary", "limit", "verdict")  # what is kept of a reading
GUARD_TIMEOUT_S = 180.0  # a finished stage without an analysis result for so long goes on hold


class Verdict(StrEnum):
    """Result of the analysis of a stage."""

    WARMING = "warming"  # too early
    PASSED = "passed"
    FAILED = "failed"  # worse than allowed
    INCONCLUSIVE = "inconclusive"  # too few requests, or too close to a limit


NO_VERDICT = "no_verdict"  # result of one figure that more time cannot judge, such as one prompt's hit rate


# --- publishing -----------------------------------------------------------------------------------------


def open_rollout(
    revision: PolicyRevision,
    plan: RolloutPlan = AT_ONCE,
    *,
    by: User | None = None,
    overridden: dict[str, Any] | None = None,
) -> Rollout:
    """Start the rollout of a published revision, or submit it for approval.

    The caller locked the policy's row and superseded its former rollouts. ``overridden``: the finding that the user
    published against, with ``override_reason``.
    """
    needs_approval = revision.policy.pool.project.needs_approval
    rollout = Rollout.objects.create(
        revision=revision,
        state=AWAITING if needs_approval else PENDING,
        plan=plan.name,
        stages=msgspec.to_builtins(list(plan.stages)),
        guard=msgspec.to_builtins(plan.guard),
        started_by=by,
    )
    record_step(rollout, "publish", by=by, reason=revision.reason, evidence=overridden)
    if overridden is not None:
        text, kind = "was published against the required prediction", EventKind.PREDICTION_OVERRIDDEN
        record_rollout_event(rollout, kind, text, by=by, detail=overridden, reason=overridden["override_reason"])
    if needs_approval:
        detail = revision_change(revision)
        record_rollout_event(rollout, EventKind.ROLLOUT_PROPOSED, "awaits approval", by=by, detail=detail)
        freeze_snapshot(reason=f"{revision} awaits approval", by=by)  # without the canary that it supersedes
    else:
        _start(rollout, by)
    return rollout


def supersede_rollouts(policy: RoutingPolicy, *, by: User | None = None, reason: str = "") -> None:
    """End the open rollouts of a policy before another publication. The caller locked the policy's row."""
    for rollout in lock_open_rollouts(revision__policy=policy):
        end_rollout(rollout, BY_USER["supersede"], by=by, reason=reason)


def _start(rollout: Rollout, by: User | None) -> None:
    change = revision_change(rollout.revision)
    enter_stage(rollout, 0, by=by)
    if is_canary(rollout):
        text, reason = f"is a canary for {scope_text(rollout)}", rollout.revision.reason
        record_rollout_event(rollout, EventKind.ROLLOUT_STARTED, text, by=by, detail=change, reason=reason)


# --- actions of users -----------------------------------------------------------------------------------


@transaction.atomic
def approve_rollout(rollout_id: int, *, by: User, reason: str = "") -> Rollout:
    """Start a rollout that another user published; SelfApprovalError for the publisher."""
    rollout = lock_rollout(rollout_id)
    if rollout.started_by_id == by.pk:
        raise SelfApprovalError("You published this revision; another user has to approve it.")
    rollout.approved_by = by
    change_state(rollout, BY_USER["approve"], by=by, reason=reason)
    _start(rollout, by)
    return rollout


@transaction.atomic
def pause_rollout(rollout_id: int, *, by: User, reason: str = "") -> Rollout:
    """Enter no further stage for now. The canary keeps its requests, and the analysis continues."""
    rollout = _lock_canary(rollout_id, "pause")
    change_state(rollout, BY_USER["pause"], by=by, reason=reason)
    return rollout


@transaction.atomic
def resume_rollout(rollout_id: int, *, by: User, reason: str = "") -> Rollout:
    """Continue after a pause."""
    rollout = _lock_canary(rollout_id, "resume")
    change_state(rollout, BY_USER["resume"], by=by, reason=reason)
    return rollout


@transaction.atomic
def promote_rollout(rollout_id: int, *, by: User, reason: str = "") -> Rollout:
    """Enter the next stage now, regardless of the analysis."""
    rollout = _lock_canary(rollout_id, "promote")
    enter_next_stage(rollout, BY_USER["promote"], by=by, reason=reason)
    return rollout


@transaction.atomic
def abort_rollout(rollout_id: int, *, by: User, reason: str = "") -> Rollout:
    """End the canary: the active revision places all requests again at once."""
    rollout = _lock_canary(rollout_id, "abort")
    end_rollout(rollout, BY_USER["abort"], by=by, reason=reason)
    freeze_snapshot(reason=f"rollout of {rollout.revision} aborted", by=by)
    return rollout


def _lock_canary(rollout_id: int, action: str) -> Rollout:
    """The locked rollout; RolloutTransitionError if its revision is already active, GoneError."""
    rollout = lock_rollout(rollout_id)
    if rollout.is_open and not is_canary(rollout):
        raise RolloutTransitionError(
            f"{rollout.revision} is already active, so there is no canary to {action}. To go back, publish the "
            "settings of an earlier revision."
        )
    return rollout


# --- results of the analysis ----------------------------------------------------------------------------


@transaction.atomic
def apply_verdict(rollout_id: int, *, stage: int, verdict: Verdict, readings: list[dict[str, Any]]) -> None:
    """Apply an analysis result to a stage; results for another stage or an ended rollout are ignored.

    A failure rolls back, also during a pause. A pass enters the next stage once the stage was observed long enough; an
    inconclusive result puts the rollout on hold from then on. Figures without a verdict leave the next canary stage to
    the others, since it may have more prompts, but no revision becomes active without a user's decision on them.
    """
    for rollout in lock_started_rollouts(pk=rollout_id, stage=stage, guard__isnull=False):
        if is_canary(rollout):
            _apply_verdict(rollout, verdict, readings)


def _apply_verdict(rollout: Rollout, verdict: Verdict, readings: list[dict[str, Any]]) -> None:
    rollout.readings, rollout.readings_at = readings, timezone.now()
    rollout.past_readings = _with_readings(rollout)
    rollout.save(update_fields=["readings", "readings_at", "past_readings"])
    unjudged = _details(readings, NO_VERDICT)
    reason = _details(readings, verdict) or unjudged or f"Analysis result: {verdict}."
    if verdict is Verdict.FAILED:
        end_rollout(rollout, AUTOMATIC["roll_back"], reason=reason, evidence=readings)
        freeze_snapshot(reason=f"rollout of {rollout.revision} rolled back")
    elif verdict is Verdict.PASSED and rollout.state in {PROGRESSING, HOLDING}:
        if _is_observed(rollout) and rollout.held_by != HoldReason.REJECTION:
            if not unjudged or rollout.stage + 2 < len(rollout.stages):
                reason = f"The analysis passed. {unjudged}".rstrip()
                enter_next_stage(rollout, AUTOMATIC["promote"], reason=reason, evidence=readings)
            elif rollout.state == PROGRESSING:
                reason = f"{unjudged} All else passed: promote it if that is enough, or abort."
                hold_rollout(rollout, HoldReason.ANALYSIS, reason, readings)
        elif rollout.held_by == HoldReason.ANALYSIS:
            change_state(rollout, AUTOMATIC["resume"], reason="The analysis is conclusive again.", evidence=readings)
    elif verdict is Verdict.INCONCLUSIVE and rollout.state == PROGRESSING and _is_observed(rollout):
        hold_rollout(rollout, HoldReason.ANALYSIS, reason, readings)


def _with_readings(rollout: Rollout) -> list[dict[str, Any]]:
    """The results of all analyses with the newest; every second one beyond ``MAX_PAST_READINGS``."""
    past: list[dict[str, Any]] = rollout.past_readings
    if not rollout.readings or rollout.readings_at is None:
        return past
    figures = [{name: reading[name] for name in PAST_FIGURE} for reading in rollout.readings]
    point = {"at": rollout.readings_at.isoformat(), "stage": rollout.stage, "figures": figures}
    return [*(past[::2] if len(past) >= MAX_PAST_READINGS else past), point]


def _details(readings: list[dict[str, Any]], verdict: str) -> str:
    return " ".join(str(reading["detail"]) for reading in readings if reading.get("verdict") == verdict)


# --- acknowledgements and the clock ---------------------------------------------------------------------


@transaction.atomic
def advance_rollouts() -> None:
    """Make the transitions that acknowledgements and the clock require. Idempotent.

    Called after each change of a router and periodically. Complete means that the revision is active and every
    connected router runs it; without a connected router nothing completes and no stage is entered.
    """
    rollouts = lock_started_rollouts()
    if rollouts:
        fleet = _Fleet.load()
        with isolated_items(PeriodicTask.ROLLOUTS) as item:
            for rollout in rollouts:
                with item(f"{rollout.pk}: {rollout.revision}"), transaction.atomic():
                    _advance(rollout, fleet)


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The connected routers, and the newest snapshot's number."""

    newest: int
    routers: Sequence[Router]

    @classmethod
    def load(cls) -> _Fleet:
        newest = ConfigSnapshot.objects.aggregate(Max("number"))["number__max"] or 0
        return cls(newest, list(Router.objects.filter(lost_at=None).order_by("name")))


def _has_reached(router: Router, snapshot: ConfigSnapshot, newest: int) -> bool:
    """Whether a router runs this snapshot or a later one of this database (another one's numbers may be higher)."""
    if router.running_number is None:
        return False
    return router.runs(snapshot.number, snapshot.sha256) or snapshot.number < router.running_number <= newest


def _advance(rollout: Rollout, fleet: _Fleet) -> None:
    snapshot = rollout.snapshot
    if snapshot is None:
        raise AssertionError(f"the {rollout} was started without a snapshot")
    running = [router for router in fleet.routers if _has_reached(router, snapshot, fleet.newest)]
    converged = bool(running) and len(running) == len(fleet.routers)
    if converged and rollout.stage_converged_at is None and _runs_on_stage_router(rollout, running):
        rollout.stage_converged_at = timezone.now()
        rollout.save(update_fields=["stage_converged_at"])
    if converged and not is_canary(rollout):
        change_state(rollout, AUTOMATIC["complete"])
        return
    if rollout.state == PENDING and running:
        change_state(rollout, AUTOMATIC["start"], evidence=[router.name for router in running])
    outdated = [router for router in fleet.routers if router not in running]
    nacks = [{"router": router.name, **(router.last_nack or {})} for router in outdated]
    _hold_or_resume(rollout, [nack for nack in nacks if nack.get("revision", 0) >= snapshot.number])
    if rollout.state == PROGRESSING and is_canary(rollout) and _is_observed(rollout):
        _finish_stage(rollout)


def _runs_on_stage_router(rollout: Rollout, running: Sequence[Router]) -> bool:
    """Whether one of the stage's own routers runs it; otherwise the canary gets no requests."""
    names = read_stage(rollout.scope).routers if rollout.scope else None
    return names is None or any(router.name in names for router in running)


def _hold_or_resume(rollout: Rollout, nacks: Sequence[dict[str, Any]]) -> None:
    if nacks and rollout.state in {PENDING, PROGRESSING}:
        reason = f"Router {nacks[0]['router']} rejects it: {nacks[0]['path']}: {nacks[0]['reason']}"
        hold_rollout(rollout, HoldReason.REJECTION, reason, nacks)
    elif not nacks and rollout.held_by == HoldReason.REJECTION:
        change_state(rollout, AUTOMATIC["resume"], reason="No router rejects it any more.")


def _finish_stage(rollout: Rollout) -> None:
    """Enter the next stage of a rollout without analysis; hold one whose analysis has stopped."""
    timeout = timedelta(seconds=GUARD_TIMEOUT_S)
    if rollout.guard is None:
        enter_next_stage(rollout, AUTOMATIC["promote"], reason="The observation time of the stage is over.")
        return
    has_result = rollout.readings_at is not None and rollout.readings_at >= timezone.now() - timeout
    if _is_observed(rollout, extra=timeout) and not has_result:
        reason = "There is no analysis result: is telemetry's worker running?"
        hold_rollout(rollout, HoldReason.ANALYSIS, reason, rollout.readings)


def _is_observed(rollout: Rollout, *, extra: timedelta = timedelta()) -> bool:
    """Whether the stage's observation time, pauses excluded, and ``extra`` are over."""
    end = rollout.stage_ends_at
    return end is not None and timezone.now() >= end + extra


# --- progress by router ---------------------------------------------------------------------------------


class Progress(StrEnum):
    ACKNOWLEDGED = "acknowledged"
    PENDING = "pending"
    REJECTED = "rejected"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RouterProgress:
    """One router compared with the snapshot of the current stage."""

    name: str
    progress: Progress
    gets_canary_requests: bool  # whether the stage includes it
    running: int | None  # number of the snapshot that it runs
    reason: str  # why it does not run the stage's snapshot; "" if it does, or the reason is unknown


def router_progress(rollout: Rollout) -> list[RouterProgress]:
    """Every router, by name; two queries. Empty while the rollout awaits approval."""
    snapshot, newest = rollout.snapshot, newest_snapshot()
    if snapshot is None or newest is None:
        return []
    names = read_stage(rollout.scope).routers if rollout.scope else None
    routers = []
    for router in Router.objects.order_by("name"):
        progress, reason = _progress_of(router, snapshot, newest.number)
        gets_canary_requests = names is None or router.name in names
        routers.append(RouterProgress(router.name, progress, gets_canary_requests, router.running_number, reason))
    return routers


def _progress_of(router: Router, snapshot: ConfigSnapshot, newest: int) -> tuple[Progress, str]:
    if router.lost_at is not None:
        reason = "No heartbeat. The router keeps serving with its configuration and is updated when it reconnects."
        return Progress.LOST, reason
    if _has_reached(router, snapshot, newest):
        return Progress.ACKNOWLEDGED, ""
    nack = router.last_nack or {}
    if nack.get("revision", 0) >= snapshot.number:
        return Progress.REJECTED, f"{nack['reason']} (at {nack['path']})"
    return Progress.PENDING, router.last_error and f"Not acknowledged yet, retrying. Last attempt: {router.last_error}"
