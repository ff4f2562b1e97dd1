"""A revision's way after it was published: tried, in force, or withdrawn.

Whoever calls these holds the policy's row or that of its open rollout, so that one moves at a time, and freezes the
snapshot afterwards. The database refuses every other way (migration 0008).

A rollout's moves: the one table of them, and making one.

Theory of operation. A rollout is a state machine whose every transition is one of the TRANSITIONS; each is made on the
locked row, refused where the table has it not, and written down as a RolloutStep and an event. What it means for
routers is said by the rows alone: while a rollout is open and approved, its revision is on trial for the requests of
its present stage; entering the last stage puts the revision in force; aborting, rolling back and superseding withdraw a
revision that is on trial, which leaves the one in force as it always was. Each of these freezes a snapshot, so that one
number says what every router should run.

The order of locks is routers, policy, rollouts by id, then the audit log's and the snapshots'.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from controlplane.errors import GoneError, RolloutMoveError
from controlplane.models import (
    OPEN_ROLLOUTS,
    EventKind,
    HoldReason,
    PolicyRevision,
    RevisionState,
    Rollout,
    RolloutState,
    RolloutStep,
)
from controlplane.services.events import record_event
from controlplane.services.policies.rollout_plans import describe_stage, read_stage
from controlplane.services.policies.settings import changes_as_json, diff_settings
from controlplane.services.snapshots import freeze_snapshot


def publish_draft(draft: PolicyRevision, *, reason: str) -> None:
    """Freeze a draft as published, on trial for nobody yet."""
    published = {"state": RevisionState.CANARY, "published_at": timezone.now(), "reason": reason[:500]}
    draft.policy.revisions.filter(pk=draft.pk, state=RevisionState.DRAFT).update(**published)
    draft.refresh_from_db()


def put_in_force(revision: PolicyRevision, *, by: User | None = None, recorded: bool = True) -> None:
    """Put the revision on trial in the place of the one in force, which is retired."""
    former = revision.policy.live()
    revision.policy.revisions.filter(state=RevisionState.LIVE).update(state=RevisionState.RETIRED)
    _move(revision, RevisionState.LIVE)
    if recorded:
        summary = f"Policy {revision.policy.name} revision {revision.number} ({revision.strategy}) was published."
        detail = change_of(revision, former)
        pool = revision.policy.pool
        record_event(EventKind.POLICY_PUBLISHED, summary, pool=pool, by=by, detail=detail, reason=revision.reason)


def withdraw(revision: PolicyRevision) -> None:
    """Try a revision no more; the one in force places everything again."""
    _move(revision, RevisionState.WITHDRAWN)


def change_of(revision: PolicyRevision, former: PolicyRevision | None) -> dict[str, Any]:
    """What an event shows of a revision that takes another's place, or would."""
    old = former.settings if former else None
    return {
        "policy": revision.policy.name,
        "revision": revision.number,
        "reason": revision.reason,
        "before": old,
        "after": revision.settings,
        "changes": changes_as_json(diff_settings(old, revision.settings)),
    }


def _move(revision: PolicyRevision, after: RevisionState) -> None:
    moved = PolicyRevision.objects.filter(pk=revision.pk, state=RevisionState.CANARY).update(state=after)
    if not moved:
        raise AssertionError(f"{revision} is not on trial: its rollout's row was not locked")
    revision.state = after


AWAITING, PENDING, PROGRESSING, PAUSED, HOLDING, COMPLETE, ABORTED, ROLLED_BACK, SUPERSEDED = RolloutState


@dataclass(frozen=True, slots=True)
class Move:
    """From which states, to which, and how the timeline calls it."""

    name: str
    before: frozenset[RolloutState]
    after: RolloutState
    event: EventKind
    says: str  # after "Revision 7 of chat"


def _to(after: RolloutState, name: str, before: Sequence[RolloutState], event: EventKind, says: str) -> Move:
    return Move(name, frozenset(before), after, event, says)


UNDER_WAY = (PENDING, PROGRESSING, PAUSED, HOLDING)
TRANSITIONS = {
    move.name: move
    for move in (
        # by people
        _to(PENDING, "approve", (AWAITING,), EventKind.ROLLOUT_APPROVED, "was approved"),
        _to(PAUSED, "pause", (PENDING, PROGRESSING, HOLDING), EventKind.ROLLOUT_PAUSED, "is paused"),
        _to(PROGRESSING, "resume", (PAUSED,), EventKind.ROLLOUT_RESUMED, "is resumed"),
        _to(PROGRESSING, "promote", (PROGRESSING, PAUSED, HOLDING), EventKind.ROLLOUT_WIDENED, "is promoted"),
        _to(ABORTED, "abort", (AWAITING, *UNDER_WAY), EventKind.ROLLOUT_ABORTED, "was withdrawn"),
        _to(SUPERSEDED, "supersede", (AWAITING, *UNDER_WAY), EventKind.ROLLOUT_SUPERSEDED, "was superseded"),
        # by what routers acknowledge, the guard and the clock
        _to(PROGRESSING, "begin", (PENDING,), EventKind.ROLLOUT_BEGUN, "runs on a first router"),
        _to(PROGRESSING, "widen", (PROGRESSING, HOLDING), EventKind.ROLLOUT_WIDENED, "goes on"),
        _to(HOLDING, "hold", (PENDING, PROGRESSING), EventKind.ROLLOUT_HELD, "is held"),
        _to(PROGRESSING, "release", (HOLDING,), EventKind.ROLLOUT_RELEASED, "is held no longer"),
        _to(COMPLETE, "complete", (PENDING, PROGRESSING, HOLDING), EventKind.ROLLOUT_COMPLETED, "is on every router"),
        _to(ROLLED_BACK, "roll_back", UNDER_WAY, EventKind.ROLLOUT_ROLLED_BACK, "was rolled back by its guard"),
    )
}


def make_move(rollout: Rollout, name: str, *, by: User | None = None, reason: str = "", evidence: Any = None) -> None:
    """Make a move of the table on a locked row, and write it down; RolloutMoveError where the table has it not."""
    move = check_move(rollout, name)
    before, rollout.state, rollout.why = rollout.state, move.after, reason[:500]
    if move.after != HOLDING:
        rollout.held_by = ""
    _keep_time(rollout)
    if not rollout.is_open:
        rollout.finished_at = timezone.now()
    rollout.save()
    note_step(rollout, name, before=before, by=by, reason=reason, evidence=evidence)
    says = f"{move.says}: {scope_text(rollout)}" if move.event == EventKind.ROLLOUT_WIDENED else move.says
    detail = {"before": before, "after": rollout.state, "evidence": evidence}
    record_rollout(rollout, move.event, says, by=by, detail=detail, reason=reason)


def _keep_time(rollout: Rollout) -> None:
    """Stop the stage's clock with a pause, and let it go on after it."""
    now, since = timezone.now(), rollout.stage_converged_at
    if rollout.state == PAUSED:
        rollout.paused_at = now
    elif rollout.paused_at is not None:
        if since is not None:
            rollout.stage_paused_s += (now - max(rollout.paused_at, since)).total_seconds()
        rollout.paused_at = None


def check_move(rollout: Rollout, name: str) -> Move:
    """The move; RolloutMoveError where the table has it not from the present state."""
    move = TRANSITIONS[name]
    if rollout.state not in move.before:
        state = RolloutState(rollout.state).label.lower()
        raise RolloutMoveError(f"The {rollout} is {state}: there is nothing to {name.replace('_', ' ')}.")
    return move


def enter_stage(rollout: Rollout, stage: int, *, by: User | None = None) -> None:
    """Have routers run a stage; the last one is the revision in force."""
    rollout.stage, rollout.stage_since, rollout.stage_converged_at = stage, timezone.now(), None
    rollout.readings, rollout.readings_at, rollout.stage_paused_s = [], None, 0.0
    rollout.save()
    if rollout.is_last_stage:
        put_in_force(rollout.revision, by=by)
    rollout.snapshot = freeze_snapshot(reason=f"{rollout.revision}: {scope_text(rollout)}", by=by)
    rollout.save(update_fields=["snapshot"])


def widen(rollout: Rollout, move: str, *, by: User | None = None, reason: str = "", evidence: Any = None) -> None:
    """Enter the next stage."""
    check_move(rollout, move)
    enter_stage(rollout, rollout.stage + 1, by=by)
    make_move(rollout, move, by=by, reason=reason, evidence=evidence)


def hold(rollout: Rollout, held_by: HoldReason, reason: str, evidence: Any) -> None:
    """Go no further until that is over."""
    rollout.held_by = held_by
    make_move(rollout, "hold", reason=reason, evidence=evidence)


def end(rollout: Rollout, move: str, *, by: User | None = None, reason: str = "", evidence: Any = None) -> None:
    """A move after which the revision is tried no more, unless it is in force. The snapshot is the caller's."""
    check_move(rollout, move)
    if is_on_trial(rollout):
        withdraw(rollout.revision)
    make_move(rollout, move, by=by, reason=reason, evidence=evidence)


def note_step(
    rollout: Rollout, move: str, *, before: str = "", by: User | None = None, reason: str = "", evidence: Any = None
) -> None:
    """Write a move down, the rollout being where it led."""
    RolloutStep.objects.create(
        rollout=rollout,
        move=move,
        before=before,
        after=rollout.state,
        stage=rollout.stage,
        by=by,
        reason=reason[:500],
        evidence=evidence,
    )


def record_rollout(
    rollout: Rollout, kind: EventKind, says: str, *, by: User | None, detail: dict[str, Any], reason: str = ""
) -> None:
    """An event of a rollout; ``says`` follows "Revision 7 of chat"."""
    revision, policy = rollout.revision, rollout.revision.policy
    told = {"policy": policy.name, "revision": revision.number, "rollout": rollout.pk, "stage": rollout.stage}
    summary = f"Revision {revision.number} of {policy.name} {says}" + (f": {reason}" if reason else ".")
    record_event(kind, summary, pool=policy.pool, by=by, detail={**told, **detail}, reason=reason)


def proposed_change(rollout: Rollout) -> dict[str, Any]:
    """What an event shows of what a rollout would put in force."""
    return change_of(rollout.revision, rollout.revision.policy.live())


def scope_text(rollout: Rollout) -> str:
    """The requests of the present stage in words."""
    return describe_stage(read_stage(rollout.scope)) if rollout.scope else "every request"


def is_on_trial(rollout: Rollout) -> bool:
    """Whether its revision can still be withdrawn."""
    return rollout.revision.state == RevisionState.CANARY


def locked_rollouts(**which: Any) -> list[Rollout]:
    """Rollouts, locked by their ids in one order, with what moves need as it is once they are locked.

    Two queries: what is joined to a row that was waited for would be as it was before the wait.
    """
    rows = Rollout.objects.select_for_update(of=("self",), no_key=True).filter(**which).order_by("pk")
    held = list(rows.values_list("pk", flat=True))
    joined = Rollout.objects.select_related("revision__policy__pool__project", "snapshot").filter(pk__in=held)
    return list(joined.defer("snapshot__encrypted", "snapshot__document").order_by("pk")) if held else []


def locked_rollout(rollout_id: int) -> Rollout:
    """One of them, whatever its state; GoneError."""
    for rollout in locked_rollouts(pk=rollout_id):
        return rollout
    raise GoneError("rollout")


def open_ones(**which: Any) -> list[Rollout]:
    """Those that may still move."""
    return locked_rollouts(state__in=OPEN_ROLLOUTS, **which)


def begun_ones(**which: Any) -> list[Rollout]:
    """Those that may still move and do not await approval."""
    return locked_rollouts(state__in=UNDER_WAY, **which)
