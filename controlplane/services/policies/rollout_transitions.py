"""The state machine of rollouts: the tables of transitions, and performing one.

Theory of operation. Every transition is made on the locked row, rejected if its table does not allow it, and recorded
as a RolloutHistoryEntry and an event. Users and the control plane have a table each, because they promote and resume
from different states: only a user resumes a paused rollout, and only the control plane resumes one that is on hold.

Rows alone tell routers what to run: while a rollout is open and approved, its revision is a canary for the requests of
the current stage; entering the last stage makes the revision active; aborting, rolling back and superseding end the
canary, so that the active revision places all requests as before. Each of these freezes a snapshot, so one number
states what every router should run. A database trigger rejects other changes of a published revision's state.

Lock order: routers, policy, rollouts by id, then the audit log's and the snapshots' advisory locks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from controlplane.errors import GoneError, RolloutTransitionError
from controlplane.models import (
    OPEN_ROLLOUTS,
    EventKind,
    HoldReason,
    PolicyRevision,
    RevisionFault,
    RevisionState,
    Rollout,
    RolloutHistoryEntry,
    RolloutState,
)
from controlplane.services.events import record_event
from controlplane.services.policies.rollout_plans import describe_stage, read_stage
from controlplane.services.policies.settings import changes_as_json, diff_settings
from controlplane.services.snapshots import freeze_snapshot

AWAITING, PENDING, PROGRESSING, PAUSED, HOLDING, COMPLETE, ABORTED, ROLLED_BACK, SUPERSEDED = RolloutState
STARTED = (PENDING, PROGRESSING, PAUSED, HOLDING)


@dataclass(frozen=True, slots=True)
class Transition:
    name: str
    before: tuple[RolloutState, ...]
    after: RolloutState
    event: EventKind
    text: str  # follows "Revision 7 of chat"; {scope} is the current stage


BY_USER = {
    transition.name: transition
    for transition in (
        Transition("approve", (AWAITING,), PENDING, EventKind.ROLLOUT_APPROVED, "was approved"),
        Transition("pause", (PENDING, PROGRESSING, HOLDING), PAUSED, EventKind.ROLLOUT_PAUSED, "was paused"),
        Transition("resume", (PAUSED,), PROGRESSING, EventKind.ROLLOUT_RESUMED, "was resumed"),
        Transition(
            "promote",
            (PROGRESSING, PAUSED, HOLDING),
            PROGRESSING,
            EventKind.ROLLOUT_PROMOTED,
            "was promoted manually to {scope}",
        ),
        Transition("abort", (AWAITING, *STARTED), ABORTED, EventKind.ROLLOUT_ABORTED, "was aborted"),
        Transition("supersede", (AWAITING, *STARTED), SUPERSEDED, EventKind.ROLLOUT_SUPERSEDED, "was superseded"),
    )
}

# Required by acknowledgements of routers, the analysis or the clock.
AUTOMATIC = {
    transition.name: transition
    for transition in (
        Transition("start", (PENDING,), PROGRESSING, EventKind.ROLLOUT_ACKNOWLEDGED, "runs on its first router"),
        Transition(
            "promote", (PROGRESSING, HOLDING), PROGRESSING, EventKind.ROLLOUT_PROMOTED, "was promoted to {scope}"
        ),
        Transition("hold", (PENDING, PROGRESSING), HOLDING, EventKind.ROLLOUT_HELD, "is on hold"),
        Transition("resume", (HOLDING,), PROGRESSING, EventKind.ROLLOUT_HOLD_ENDED, "is no longer on hold"),
        Transition(
            "complete",
            (PENDING, PROGRESSING, HOLDING),
            COMPLETE,
            EventKind.ROLLOUT_COMPLETED,
            "is active on every router",
        ),
        Transition("roll_back", STARTED, ROLLED_BACK, EventKind.ROLLOUT_ROLLED_BACK, "was rolled back automatically"),
    )
}

TRANSITIONS = (*BY_USER.values(), *AUTOMATIC.values())


# --- revisions ------------------------------------------------------------------------------------------


def publish_draft(draft: PolicyRevision, *, reason: str) -> None:
    """Make a draft an immutable revision: a canary without requests."""
    fields = {"state": RevisionState.CANARY, "published_at": timezone.now(), "reason": reason[:500]}
    draft.policy.revisions.filter(pk=draft.pk, state=RevisionState.DRAFT).update(**fields)
    draft.refresh_from_db()


def activate_revision(revision: PolicyRevision, *, by: User | None = None, record: bool = True) -> None:
    """Replace the active revision by the canary."""
    detail = revision_change(revision)
    revision.policy.revisions.filter(state=RevisionState.LIVE).update(state=RevisionState.RETIRED)
    _end_canary(revision, RevisionState.LIVE)
    if record:
        summary = f"Policy {revision.policy.name} revision {revision.number} ({revision.strategy}) is active."
        pool = revision.policy.pool
        record_event(EventKind.POLICY_PUBLISHED, summary, pool=pool, by=by, detail=detail, reason=revision.reason)


def revision_change(revision: PolicyRevision) -> dict[str, Any]:
    """Event details of a revision that replaces, or would replace, the active one."""
    active = revision.policy.live()
    before = active.settings if active else None
    return {
        "policy": revision.policy.name,
        "revision": revision.number,
        "reason": revision.reason,
        "before": before,
        "after": revision.settings,
        "changes": changes_as_json(diff_settings(before, revision.settings)),
    }


def _end_canary(revision: PolicyRevision, after: RevisionState) -> None:
    changed = PolicyRevision.objects.filter(pk=revision.pk, state=RevisionState.CANARY).update(state=after)
    if not changed:
        raise AssertionError(f"{revision} is not a canary: its rollout's row was not locked")
    revision.state = after


# --- rollouts -------------------------------------------------------------------------------------------


def check_transition(rollout: Rollout, transition: Transition) -> None:
    """RolloutTransitionError unless the transition is allowed from the current state."""
    if rollout.state not in transition.before:
        state, name = RolloutState(rollout.state).label.lower(), transition.name.replace("_", " ")
        raise RolloutTransitionError(f"The {rollout} is {state} and cannot be changed by {name}.")


def change_state(
    rollout: Rollout, transition: Transition, *, by: User | None = None, reason: str = "", evidence: Any = None
) -> None:
    """Perform a transition on a locked row and record it; RolloutTransitionError."""
    check_transition(rollout, transition)
    before, rollout.state, rollout.why = rollout.state, transition.after, reason[:500]
    if transition.after != HOLDING:
        rollout.held_by = ""
    _update_stage_clock(rollout)
    if not rollout.is_open:
        rollout.finished_at = timezone.now()
    rollout.save()
    record_step(rollout, transition.name, before=before, by=by, reason=reason, evidence=evidence)
    detail = {"before": before, "after": rollout.state, "evidence": evidence}
    text = transition.text.format(scope=scope_text(rollout))
    record_rollout_event(rollout, transition.event, text, by=by, detail=detail, reason=reason)


def _update_stage_clock(rollout: Rollout) -> None:
    """Stop the stage's clock during a pause."""
    now, since = timezone.now(), rollout.stage_converged_at
    if rollout.state == PAUSED:
        rollout.paused_at = now
    elif rollout.paused_at is not None:
        if since is not None:
            rollout.stage_paused_s += (now - max(rollout.paused_at, since)).total_seconds()
        rollout.paused_at = None


def enter_stage(rollout: Rollout, stage: int, *, by: User | None = None) -> None:
    """Freeze a snapshot with the stage; the last stage makes the revision active."""
    rollout.stage, rollout.stage_since, rollout.stage_converged_at = stage, timezone.now(), None
    rollout.readings, rollout.readings_at, rollout.stage_paused_s = [], None, 0.0
    rollout.save()
    if rollout.is_last_stage:
        activate_revision(rollout.revision, by=by)
    rollout.snapshot = freeze_snapshot(reason=f"{rollout.revision}: {scope_text(rollout)}", by=by)
    rollout.save(update_fields=["snapshot"])


def enter_next_stage(
    rollout: Rollout, transition: Transition, *, by: User | None = None, reason: str = "", evidence: Any = None
) -> None:
    """Enter the next stage by a user's or the automatic ``promote``."""
    check_transition(rollout, transition)
    enter_stage(rollout, rollout.stage + 1, by=by)
    change_state(rollout, transition, by=by, reason=reason, evidence=evidence)


def hold_rollout(rollout: Rollout, held_by: HoldReason, reason: str, evidence: Any) -> None:
    rollout.held_by = held_by
    change_state(rollout, AUTOMATIC["hold"], reason=reason, evidence=evidence)


def end_rollout(
    rollout: Rollout, transition: Transition, *, by: User | None = None, reason: str = "", evidence: Any = None
) -> None:
    """Perform a final transition, which ends the canary. The caller freezes the snapshot."""
    check_transition(rollout, transition)
    if is_canary(rollout):
        _end_canary(rollout.revision, RevisionState.ROLLED_BACK)
    if transition.after == ROLLED_BACK:
        PolicyRevision.objects.filter(pk=rollout.revision_id).update(fault=RevisionFault.ANALYSIS, fault_alert=None)
    change_state(rollout, transition, by=by, reason=reason, evidence=evidence)


def record_step(
    rollout: Rollout, name: str, *, before: str = "", by: User | None = None, reason: str = "", evidence: Any = None
) -> None:
    """Record a transition after it was made."""
    RolloutHistoryEntry.objects.create(
        rollout=rollout,
        transition=name,
        before=before,
        after=rollout.state,
        stage=rollout.stage,
        by=by,
        reason=reason[:500],
        evidence=evidence,
    )


def record_rollout_event(
    rollout: Rollout, kind: EventKind, text: str, *, by: User | None, detail: dict[str, Any], reason: str = ""
) -> None:
    """Record an event; ``text`` follows "Revision 7 of chat"."""
    revision, policy = rollout.revision, rollout.revision.policy
    detail = {
        "policy": policy.name,
        "revision": revision.number,
        "rollout": rollout.pk,
        "stage": rollout.stage,
        **detail,
    }
    summary = f"Revision {revision.number} of {policy.name} {text}" + (f": {reason}" if reason else ".")
    record_event(kind, summary, pool=policy.pool, by=by, detail=detail, reason=reason)


def scope_text(rollout: Rollout) -> str:
    """The requests of the current stage in words."""
    return describe_stage(read_stage(rollout.scope)) if rollout.scope else "every request"


def is_canary(rollout: Rollout) -> bool:
    """Whether its revision can still be rolled back."""
    return rollout.revision.state == RevisionState.CANARY


def lock_rollouts(**filters: Any) -> list[Rollout]:
    """Rollouts, locked in the order of their ids, with the related rows as they are once the locks are held.

    Two queries, because a joined query returns related rows as they were before it waited for the lock.
    """
    rows = Rollout.objects.select_for_update(of=("self",), no_key=True).filter(**filters).order_by("pk")
    locked = list(rows.values_list("pk", flat=True))
    joined = Rollout.objects.select_related("revision__policy__pool__project", "snapshot").filter(pk__in=locked)
    return list(joined.defer("snapshot__encrypted", "snapshot__document").order_by("pk")) if locked else []


def lock_rollout(rollout_id: int) -> Rollout:
    """One rollout in any state; GoneError."""
    for rollout in lock_rollouts(pk=rollout_id):
        return rollout
    raise GoneError("rollout")


def lock_open_rollouts(**filters: Any) -> list[Rollout]:
    return lock_rollouts(state__in=OPEN_ROLLOUTS, **filters)


def lock_started_rollouts(**filters: Any) -> list[Rollout]:
    """Open rollouts that do not await approval."""
    return lock_rollouts(state__in=STARTED, **filters)
