"""The life cycle of a policy's revisions: draft, publish, revert."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Exists, Max, OuterRef, Q, QuerySet

from controlplane.errors import (
    ConflictError,
    FaultedRevisionError,
    GoneError,
    InvalidError,
    NameTakenError,
    NotADraftError,
    StaleDraftError,
)
from controlplane.models import (
    EventKind,
    PolicyRevision,
    Pool,
    RevisionFault,
    RevisionState,
    Rollout,
    RoutingPolicy,
    TaskGroup,
)
from controlplane.services.checks import lock_row, unique_or
from controlplane.services.events import record_event
from controlplane.services.policies.publish_checks import Finding, check_publishable
from controlplane.services.policies.rollout_plans import AT_ONCE, RolloutPlan
from controlplane.services.policies.rollout_transitions import activate_revision, publish_draft
from controlplane.services.policies.rollouts import open_rollout, supersede_rollouts
from controlplane.services.policies.settings import canonical_settings, settings_digest
from controlplane.services.snapshots import freeze_snapshot


@transaction.atomic
def create_policy(pool: Pool, group: TaskGroup, *, by: User | None = None) -> RoutingPolicy:
    """Create a policy without revisions for a task group; NameTakenError if it has one."""
    policy = _create_policy(pool, group)
    summary = f"Policy {policy.name} was created; it applies to the task group once its first revision is published."
    record_event(EventKind.POLICY_CREATED, summary, pool=pool, by=by, detail={"after": {"name": policy.name}})
    return policy


def _create_policy(pool: Pool, group: TaskGroup | None) -> RoutingPolicy:
    name = f"{pool.name}.{group.name}" if group else pool.name
    with unique_or(lambda _: NameTakenError("policy", name)):
        return RoutingPolicy.objects.create(name=name, pool=pool, group=group)


@transaction.atomic
def create_first_policy(pool: Pool, settings: dict[str, Any], *, by: User | None = None) -> None:
    """Create the policy of a new pool with an active revision. The caller freezes the snapshot."""
    policy = _create_policy(pool, None)
    draft = _write_draft(policy, canonical_settings(settings), by=by, reason="First policy of the pool")
    publish_draft(draft, reason=draft.reason)
    activate_revision(draft, record=False)


@transaction.atomic
def remove_policy(policy: RoutingPolicy, *, by: User | None = None) -> None:
    """Remove a task group's policy, so that the pool's policy applies; ConflictError for a pool's policy."""
    policy = _lock(policy.pk)
    if policy.group_id is None:
        raise ConflictError(f"Policy {policy.name} places the whole pool; publish another revision instead.")
    active = policy.live()
    detail = {"before": active.settings if active else None, "after": None}
    policy.delete()
    summary = f"Policy {policy.name} was removed; the pool's policy applies to the task group."
    record_event(EventKind.POLICY_REMOVED, summary, pool=policy.pool, by=by, detail=detail)
    freeze_snapshot(reason=f"policy {policy.name} removed", by=by)


@transaction.atomic
def save_draft(
    policy: RoutingPolicy,
    settings: dict[str, Any],
    *,
    by: User | None = None,
    reason: str = "",
    based_on: int | None = None,
) -> PolicyRevision:
    """Write the policy's only draft, replacing a former one. Nothing reaches a router.

    ``based_on`` is the number of the active revision that the editor saw: StaleDraftError if another one is active.
    InvalidError names the path of a setting that routers would reject.
    """
    canonical = canonical_settings(settings)
    policy = _lock(policy.pk)
    _check_active(policy, based_on)
    former = policy.draft()
    draft = _write_draft(policy, canonical, by=by, reason=reason)
    if former is None or (former.digest, former.reason) != (draft.digest, draft.reason):
        detail = {"before": former.settings if former else None, "after": draft.settings}
        summary = f"Draft {draft.number} of policy {policy.name} was saved."
        record_event(EventKind.DRAFT_SAVED, summary, pool=policy.pool, by=by, detail=detail, reason=reason)
    return draft


def _write_draft(policy: RoutingPolicy, settings: dict[str, Any], *, by: User | None, reason: str) -> PolicyRevision:
    newest = policy.revisions.aggregate(Max("number"))["number__max"] or 0
    draft = policy.draft() or PolicyRevision(policy=policy, number=newest + 1)
    draft.settings, draft.digest = settings, settings_digest(settings)
    draft.author, draft.reason = by, reason
    draft.save()
    return draft


@transaction.atomic
def discard_draft(policy: RoutingPolicy, *, by: User | None = None) -> None:
    """Delete the draft; NotADraftError if there is none."""
    policy = _lock(policy.pk)
    if (draft := policy.draft()) is None:
        raise NotADraftError(f"Policy {policy.name} has no draft.")
    draft.delete()
    summary = f"Draft {draft.number} of policy {policy.name} was discarded."
    detail = {"before": draft.settings, "after": None}
    record_event(EventKind.DRAFT_DISCARDED, summary, pool=policy.pool, by=by, detail=detail)


@transaction.atomic
def publish_revision(
    revision_id: int,
    *,
    by: User | None = None,
    reason: str = "",
    expected_digest: str | None = None,
    plan: RolloutPlan = AT_ONCE,
    override_reason: str = "",
    confirm_faulted: bool = False,
) -> Rollout:
    """Publish a draft and start its rollout, which supersedes the policy's open one.

    GoneError for an unknown id; NotADraftError if it is published already; StaleDraftError if ``expected_digest`` is
    given and the draft was edited since; InvalidError for stages of a policy without an active revision, because
    nothing could be compared or rolled back to; PredictionRequiredError if the pool requires a prediction that the
    draft does not have, unless ``override_reason`` says why it is published all the same; FaultedRevisionError for
    settings that an alert or an analysis named, without ``confirm_faulted``.
    """
    revision = _lock_draft(revision_id, expected_digest)
    if plan.stages and revision.policy.live() is None:
        raise InvalidError("$.plan", "this policy has no active revision to roll back to; publish it all at once")
    check_not_faulted(revision.policy, revision.digest, is_confirmed=confirm_faulted)
    overridden = check_publishable(revision, override_reason)
    return _publish(revision, plan, by=by, reason=reason, overridden=overridden, override_reason=override_reason)


def _lock_draft(revision_id: int, expected_digest: str | None) -> PolicyRevision:
    """The draft, with its policy's row locked."""
    policy_id = PolicyRevision.objects.filter(pk=revision_id).values_list("policy_id", flat=True).first()
    if policy_id is None:
        raise GoneError("draft")
    policy = _lock(policy_id)
    revision = policy.revisions.filter(pk=revision_id, state=RevisionState.DRAFT).first()
    if revision is None:
        raise NotADraftError(f"This revision of {policy.name} is no longer a draft: it was published or discarded.")
    if expected_digest is not None and expected_digest != revision.digest:
        raise StaleDraftError(
            f"The draft of {policy.name} was edited since you opened it. Reload it and check the changes."
        )
    return revision


def _publish(
    revision: PolicyRevision,
    plan: RolloutPlan = AT_ONCE,
    *,
    by: User | None,
    reason: str,
    overridden: Finding | None = None,
    override_reason: str = "",
) -> Rollout:
    """Publish a draft whose policy is locked. ``overridden``: what the user published it against."""
    supersede_rollouts(revision.policy, by=by, reason=f"Revision {revision.number} was published.")
    publish_draft(revision, reason=reason or revision.reason)
    evidence = None
    if overridden is not None:
        reasons = {"override_reason": override_reason.strip()[:500], "detail": overridden.detail}
        evidence = {**reasons, **overridden.as_json()}
    return open_rollout(revision, plan, by=by, overridden=evidence)


@transaction.atomic
def revert_policy(
    policy: RoutingPolicy,
    number: int,
    *,
    by: User | None = None,
    reason: str = "",
    expected_live: int | None = None,
    confirm_faulted: bool = False,
) -> Rollout:
    """Publish a new revision with the settings of an earlier one. An existing draft is kept, as the next revision.

    ConflictError if these settings are active; StaleDraftError if ``expected_live`` is given and another revision is
    active; FaultedRevisionError as for ``publish_revision``. PolicyRevision.DoesNotExist for a number that was never
    published.
    """
    policy = _lock(policy.pk)
    earlier = policy.revisions.exclude(state=RevisionState.DRAFT).get(number=number)
    active, draft = policy.live(), policy.draft()
    _check_active(policy, expected_live)
    if active is not None and active.digest == earlier.digest:
        raise ConflictError(
            f"Policy {policy.name} already runs the settings of revision {number}, as revision {active.number}."
        )
    check_not_faulted(policy, earlier.digest, is_confirmed=confirm_faulted)
    reason = f"Back to revision {number}: {reason}" if reason else f"Back to revision {number}."
    copy = _write_draft(policy, earlier.settings, by=by, reason=reason)
    rollout = _publish(_lock_draft(copy.pk, None), by=by, reason=reason)  # no prediction is needed
    if draft is not None:
        _write_draft(policy, draft.settings, by=draft.author, reason=draft.reason)
    return rollout


def filter_revisions(
    rows: QuerySet[PolicyRevision], *, state: str = "", author: str = "", strategy: str = ""
) -> QuerySet[PolicyRevision]:
    """The revisions of one state, author or strategy; "" matches any."""
    if "\0" in author + strategy:  # PostgreSQL rejects it in a parameter
        return rows.none()
    filters = {"state": state, "author__username": author, "settings__strategy": strategy}
    return rows.filter(**{field: value for field, value in filters.items() if value})


def _lock(policy_id: int) -> RoutingPolicy:
    """The locked row: one writer at a time for each policy."""
    rows = RoutingPolicy.objects.select_for_update(of=("self",), no_key=True).select_related("pool")
    return lock_row(rows, policy_id)


def _check_active(policy: RoutingPolicy, number: int | None) -> None:
    """StaleDraftError unless revision ``number`` is active; None matches any."""
    active = policy.live()
    if number is not None and (active is None or active.number != number):
        raise StaleDraftError(
            f"Revision {number} of {policy.name} is no longer active. Reload and check the active one first."
        )


def faulted_revision(policy: RoutingPolicy, digest: str) -> PolicyRevision | None:
    """The newest faulty revision with these settings. One query."""
    return policy.revisions.filter(digest=digest).exclude(fault="").order_by("-number").first()


def fault_text(revision: PolicyRevision) -> str:
    """Why a faulty revision is one, as a sentence."""
    name = f"Revision {revision.number} of {revision.policy.name} ({revision.strategy})"
    if revision.fault == RevisionFault.ALERT:
        return f"{name} was named by alert {revision.fault_alert} as the most likely cause of a drop."
    return f"{name} was rolled back by its analysis."


def check_not_faulted(policy: RoutingPolicy, digest: str, *, is_confirmed: bool) -> None:
    """FaultedRevisionError for settings of a faulty revision, unless the user confirmed them."""
    revision = None if is_confirmed else faulted_revision(policy, digest)
    if revision is not None:
        members = {"revision": revision.number, "fault": revision.fault, "alert": revision.fault_alert}
        raise FaultedRevisionError(fault_text(revision), members)


def healthy_revisions() -> QuerySet[PolicyRevision]:
    """Former revisions whose settings are neither active nor faulty, newest first."""
    same = PolicyRevision.objects.filter(policy=OuterRef("policy"), digest=OuterRef("digest"))
    unwanted = same.filter(Q(state=RevisionState.LIVE) | ~Q(fault=""))
    return PolicyRevision.objects.filter(~Exists(unwanted), state=RevisionState.RETIRED).order_by("-number")


def record_alert_cause(alert: int, policy: str, number: int | None) -> None:
    """Mark the revision that is an alert's most likely cause, instead of the one that it named before.

    ``number`` is None where the alert names no revision.
    """
    named = PolicyRevision.objects.filter(policy__name=policy, number=number or 0)
    PolicyRevision.objects.filter(fault_alert=alert).exclude(pk__in=named).update(fault="", fault_alert=None)
    named.filter(fault="").update(fault=RevisionFault.ALERT, fault_alert=alert)


def clear_recovered(firing: QuerySet[Any, Any]) -> None:
    """Remove the marks of active revisions that no firing alert names any more: the level recovered under them."""
    active = PolicyRevision.objects.filter(state=RevisionState.LIVE, fault=RevisionFault.ALERT)
    active.exclude(fault_alert__in=firing).update(fault="", fault_alert=None)
