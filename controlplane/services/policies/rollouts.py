"""Rollouts: how a published revision comes into force, stage by stage, and how it is taken back.

Theory of operation. What may happen to a rollout is the table in ``moves``. Nothing is remembered but what is
in the rows: ``advance_rollouts`` compares them with what routers acknowledged and with the clock, as often as anybody
likes, in as many processes as there are; whoever comes second finds the move made.

What holds a rollout: a router that refuses the configuration, until none does; the guard, when it cannot tell after the
time that the stage is observed for, until it can or a person decides. A pause is a person's: the requests on trial stay
on trial, the guard still watches and rolls back, and nothing is widened.

How far each router has come to a rollout's present stage, for pages and REST.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from controlplane.errors import OwnPublicationError, RolloutMoveError
from controlplane.isolation import isolated_items
from controlplane.models import (
    ConfigSnapshot,
    EventKind,
    HoldReason,
    PeriodicTask,
    PolicyRevision,
    Rollout,
    RolloutState,
    Router,
    RoutingPolicy,
)
from controlplane.services.policies.rollout_plans import AT_ONCE, RolloutPlan, read_stage
from controlplane.services.policies.rollout_transitions import (
    begun_ones,
    end,
    enter_stage,
    hold,
    is_on_trial,
    locked_rollout,
    make_move,
    note_step,
    open_ones,
    proposed_change,
    record_rollout,
    scope_text,
    widen,
)
from controlplane.services.snapshots import freeze_snapshot, newest_snapshot

GUARD_TIMEOUT_S = 180.0  # a guard that says nothing for so long of a stage that is due cannot tell


class Verdict(StrEnum):
    """What the guard says of a stage."""

    WARMING = "warming"  # too early to judge
    PASSED = "passed"
    BREACHED = "breached"
    INCONCLUSIVE = "inconclusive"  # too few requests, or too close to tell


# --- publishing --------------------------------------------------------------------------------------


def open_rollout(revision: PolicyRevision, plan: RolloutPlan = AT_ONCE, *, by: User | None = None) -> Rollout:
    """Begin a published revision's way by its plan, or have it wait for a second person.

    The policy's row is locked, its former rollouts are superseded, and the revision is on trial.
    """
    waits = revision.policy.pool.project.needs_approval
    rollout = Rollout.objects.create(
        revision=revision,
        state=RolloutState.AWAITING_APPROVAL if waits else RolloutState.PENDING,
        plan=plan.name,
        stages=plan.stages_as_json(),
        guard=plan.guard_as_json(),
        started_by=by,
    )
    note_step(rollout, "publish", by=by, reason=revision.reason)
    if waits:
        says, detail = "awaits approval by somebody else", proposed_change(rollout)
        record_rollout(rollout, EventKind.ROLLOUT_PROPOSED, says, by=by, detail=detail)
        freeze_snapshot(reason=f"{revision} awaits approval", by=by)  # what it supersedes is on trial no longer
    else:
        _start(rollout, by)
    return rollout


def supersede_rollouts(policy: RoutingPolicy, *, by: User | None = None, reason: str = "") -> None:
    """End what is on its way: another publication comes first. The policy's row is locked."""
    for rollout in open_ones(revision__policy=policy):
        end(rollout, "supersede", by=by, reason=reason)


def _start(rollout: Rollout, by: User | None) -> None:
    """Enter the first stage, or what there is without stages."""
    change = proposed_change(rollout)
    enter_stage(rollout, 0, by=by)
    if is_on_trial(rollout):
        says = f"is tried on {scope_text(rollout)}"
        record_rollout(rollout, EventKind.ROLLOUT_STARTED, says, by=by, detail=change, reason=rollout.revision.reason)


# --- what people do ----------------------------------------------------------------------------------


@transaction.atomic
def approve_rollout(rollout_id: int, *, by: User, reason: str = "") -> Rollout:
    """Let what somebody else published begin; OwnPublicationError for who published it."""
    rollout = locked_rollout(rollout_id)
    if rollout.started_by_id == by.pk:
        raise OwnPublicationError("You published this yourself; somebody else has to approve it.")
    rollout.approved_by = by
    make_move(rollout, "approve", by=by, reason=reason)
    _start(rollout, by)
    return rollout


@transaction.atomic
def pause_rollout(rollout_id: int, *, by: User, reason: str = "") -> Rollout:
    """Widen no further for now. What is on trial stays so, and the guard still watches."""
    rollout = _on_trial(rollout_id, "pause")
    make_move(rollout, "pause", by=by, reason=reason)
    return rollout


@transaction.atomic
def resume_rollout(rollout_id: int, *, by: User, reason: str = "") -> Rollout:
    """Go on after a pause."""
    rollout = _on_trial(rollout_id, "resume")
    make_move(rollout, "resume", by=by, reason=reason)
    return rollout


@transaction.atomic
def promote_rollout(rollout_id: int, *, by: User, reason: str = "") -> Rollout:
    """Go to the next stage now, whatever was observed of this one."""
    rollout = _on_trial(rollout_id, "promote")
    widen(rollout, "promote", by=by, reason=reason)
    return rollout


@transaction.atomic
def abort_rollout(rollout_id: int, *, by: User, reason: str = "") -> Rollout:
    """Withdraw the revision: the one in force places everything again, at once."""
    rollout = _on_trial(rollout_id, "abort")
    end(rollout, "abort", by=by, reason=reason)
    freeze_snapshot(reason=f"rollout of {rollout.revision} aborted", by=by)
    return rollout


def _on_trial(rollout_id: int, move: str) -> Rollout:
    """The rollout, for a move that needs its revision to be on trial; RolloutMoveError, GoneError."""
    rollout = locked_rollout(rollout_id)
    if rollout.is_open and not is_on_trial(rollout):
        raise RolloutMoveError(
            f"{rollout.revision} is in force already, so there is no trial to {move}; to take it back, publish the "
            "settings of an earlier revision."
        )
    return rollout


# --- what the guard says -----------------------------------------------------------------------------


@transaction.atomic
def apply_verdict(rollout_id: int, *, stage: int, verdict: Verdict, readings: list[dict[str, Any]]) -> None:
    """Take the guard's verdict on a stage; one on another stage, or on what has ended, changes nothing.

    A breach rolls back, in a pause too. Passing goes on once the stage was observed for its time; being inconclusive
    beyond that time holds.
    """
    for rollout in begun_ones(pk=rollout_id, stage=stage, guard__isnull=False):
        if is_on_trial(rollout):
            _judge(rollout, verdict, readings)


def _judge(rollout: Rollout, verdict: Verdict, readings: list[dict[str, Any]]) -> None:
    rollout.readings, rollout.readings_at = readings, timezone.now()
    rollout.save(update_fields=["readings", "readings_at"])
    if verdict is Verdict.BREACHED:
        end(rollout, "roll_back", reason=_said(readings, verdict), evidence=readings)
        freeze_snapshot(reason=f"rollout of {rollout.revision} rolled back")
    elif verdict is Verdict.PASSED and rollout.state in {RolloutState.PROGRESSING, RolloutState.HOLDING}:
        _pass(rollout, readings)
    elif verdict is Verdict.INCONCLUSIVE and rollout.state == RolloutState.PROGRESSING and _is_due(rollout):
        hold(rollout, HoldReason.GUARD, _said(readings, verdict), readings)


def _pass(rollout: Rollout, readings: list[dict[str, Any]]) -> None:
    if _is_due(rollout) and rollout.held_by != HoldReason.REFUSAL:
        widen(rollout, "widen", reason="The guard found nothing wrong.", evidence=readings)
    elif rollout.held_by == HoldReason.GUARD:
        make_move(rollout, "release", reason="The guard can tell again.", evidence=readings)


def _said(readings: Sequence[dict[str, Any]], verdict: Verdict) -> str:
    """What the readings of that verdict say, in a line."""
    of_it = [reading for reading in readings if reading.get("verdict") == verdict]
    return " ".join(str(reading["detail"]) for reading in of_it) or f"The guard says: {verdict}."


# --- what routers and the clock say -------------------------------------------------------------------


@transaction.atomic
def advance_rollouts() -> None:
    """Bring every open rollout to where acknowledgements and the clock say that it is.

    Complete means in force and run by every router present; with no router present nothing is complete, nor is
    anything widened. Idempotent; called after each change of a router, and with each tick.
    """
    rollouts = begun_ones()
    if rollouts:
        fleet = _Fleet.now()
        with isolated_items(PeriodicTask.ROLLOUTS) as item:
            for rollout in rollouts:
                with item(f"{rollout.pk}: {rollout.revision}"), transaction.atomic():
                    _advance(rollout, fleet)


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The routers that are present, and the newest number that there is."""

    newest: int
    present: Sequence[Router]

    @classmethod
    def now(cls) -> _Fleet:
        newest = ConfigSnapshot.objects.aggregate(Max("number"))["number__max"] or 0
        return cls(newest, list(Router.objects.filter(lost_at=None).order_by("name")))

    def holding(self, snapshot: ConfigSnapshot) -> list[Router]:
        return [router for router in self.present if holds(router, snapshot, self.newest)]

    def refusals(self, snapshot: ConfigSnapshot) -> list[dict[str, Any]]:
        """What those that do not run it said of it, or of a later one."""
        others = (router for router in self.present if not holds(router, snapshot, self.newest))
        nacks = ({"router": router.name, **(router.last_nack or {})} for router in others)
        return [nack for nack in nacks if nack.get("revision", 0) >= snapshot.number]


def holds(router: Router, snapshot: ConfigSnapshot, newest: int) -> bool:
    """Whether a router runs this snapshot or a later one of ours (another database's numbers may be higher)."""
    if router.running_number is None:
        return False
    return router.runs(snapshot.number, snapshot.sha256) or snapshot.number < router.running_number <= newest


def _advance(rollout: Rollout, fleet: _Fleet) -> None:
    snapshot = rollout.snapshot
    if snapshot is None:
        raise AssertionError(f"the {rollout} began without a snapshot")
    holding = fleet.holding(snapshot)
    converged = bool(holding) and len(holding) == len(fleet.present)
    if converged and rollout.stage_converged_at is None and _is_served(rollout, holding):
        rollout.stage_converged_at = timezone.now()
        rollout.save(update_fields=["stage_converged_at"])
    if converged and not is_on_trial(rollout):
        make_move(rollout, "complete")
        return
    if rollout.state == RolloutState.PENDING and holding:
        make_move(rollout, "begin", evidence=[router.name for router in holding])
    _hold_or_release(rollout, fleet.refusals(snapshot))
    if rollout.state == RolloutState.PROGRESSING and is_on_trial(rollout) and _is_due(rollout):
        _go_on(rollout)


def _is_served(rollout: Rollout, holding: Sequence[Router]) -> bool:
    """Whether one of the stage's own routers runs it; without that nothing is tried."""
    named = read_stage(rollout.scope).routers if rollout.scope else None
    return named is None or any(router.name in named for router in holding)


def _hold_or_release(rollout: Rollout, refusals: Sequence[dict[str, Any]]) -> None:
    if refusals and rollout.state in {RolloutState.PENDING, RolloutState.PROGRESSING}:
        first = refusals[0]
        reason = f"Router {first['router']} refuses it: {first['path']}: {first['reason']}"
        hold(rollout, HoldReason.REFUSAL, reason, refusals)
    elif not refusals and rollout.held_by == HoldReason.REFUSAL:
        make_move(rollout, "release", reason="No router refuses it any more.")


def _go_on(rollout: Rollout) -> None:
    """A stage was observed for its time: enter the next one, unless it is the guard's to say so."""
    silent_since = timezone.now() - timedelta(seconds=GUARD_TIMEOUT_S)
    if rollout.guard is None:
        widen(rollout, "widen", reason="It was observed for its time.")
    elif _is_due(rollout, beyond_s=GUARD_TIMEOUT_S) and (
        rollout.readings_at is None or rollout.readings_at < silent_since
    ):
        hold(rollout, HoldReason.GUARD, "The guard says nothing: is telemetry's worker running?", rollout.readings)


def _is_due(rollout: Rollout, *, beyond_s: float = 0.0) -> bool:
    """Whether the present stage was observed for its time, and so much longer; pauses do not count."""
    ends = rollout.stage_ends_at
    return ends is not None and timezone.now() >= ends + timedelta(seconds=beyond_s)


class Progress(StrEnum):
    """Where one router stands."""

    ACKNOWLEDGED = "acknowledged"
    PENDING = "pending"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RouterProgress:
    """One router against the configuration of the present stage."""

    name: str
    progress: Progress
    on_trial: bool  # whether the stage tries the revision on it
    running: int | None  # the configuration that it runs
    reason: str  # why it does not run the stage's; "" where it does, or nothing is known


def router_progress(rollout: Rollout) -> list[RouterProgress]:
    """Every router, by name; two queries. Nothing while it awaits approval."""
    snapshot, newest = rollout.snapshot, newest_snapshot()
    if snapshot is None or newest is None:
        return []
    named = read_stage(rollout.scope).routers if rollout.scope else None
    return [_of(router, snapshot, newest.number, named) for router in Router.objects.order_by("name")]


def _of(router: Router, snapshot: ConfigSnapshot, newest: int, named: tuple[str, ...] | None) -> RouterProgress:
    progress, reason = _standing(router, snapshot, newest)
    on_trial = named is None or router.name in named
    return RouterProgress(router.name, progress, on_trial, router.running_number, reason)


def _standing(router: Router, snapshot: ConfigSnapshot, newest: int) -> tuple[Progress, str]:
    """The most telling cause first."""
    if router.lost_at is not None:
        return Progress.LOST, "Silent. It serves on with what it has, and is told as soon as it is back."
    if holds(router, snapshot, newest):
        return Progress.ACKNOWLEDGED, ""
    nack = router.last_nack or {}
    if nack.get("revision", 0) >= snapshot.number:
        return Progress.REFUSED, f"{nack['reason']} (at {nack['path']})"
    return Progress.PENDING, router.last_error
