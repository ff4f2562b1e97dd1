"""Drafts, revisions, and going live.

A policy's history: narrowing it, and taking an earlier revision back into force.
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import Max, QuerySet

from controlplane.errors import ConflictError, GoneError, InvalidError, NameTakenError, NotADraftError, StaleDraftError
from controlplane.models import EventKind, PolicyRevision, Pool, RevisionState, Rollout, RoutingPolicy, TaskGroup
from controlplane.services.checks import lock_row
from controlplane.services.events import record_event
from controlplane.services.policies.rollout_plans import AT_ONCE, RolloutPlan
from controlplane.services.policies.rollout_transitions import publish_draft, put_in_force
from controlplane.services.policies.rollouts import open_rollout, supersede_rollouts
from controlplane.services.policies.settings import canonical_settings, settings_digest
from controlplane.services.snapshots import freeze_snapshot


@transaction.atomic
def create_policy(pool: Pool, group: TaskGroup | None = None) -> RoutingPolicy:
    """A policy without revisions, of a pool or of one of its groups; NameTakenError if there is one already."""
    name = f"{pool.name}.{group.name}" if group else pool.name
    try:
        with transaction.atomic():
            return RoutingPolicy.objects.create(name=name, pool=pool, group=group)
    except IntegrityError:
        raise NameTakenError("policy", name) from None


@transaction.atomic
def remove_policy(policy: RoutingPolicy, *, by: User | None = None) -> None:
    """Take a group's own policy away, so that its pool's places it; ConflictError for a pool's policy."""
    policy = _locked(policy.pk)
    if policy.group_id is None:
        raise ConflictError(f"Policy {policy.name} places the whole pool; publish another revision instead.")
    live = policy.live()
    before = live.settings if live else None
    policy.delete()
    summary = f"Policy {policy.name} was removed; the pool's policy places the group now."
    record_event(EventKind.POLICY_REMOVED, summary, pool=policy.pool, by=by, detail={"before": before, "after": None})
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
    """Write the policy's one draft, over the former draft if there is one; nothing reaches a router.

    ``based_on`` is the number of the live revision that the editor looked at: StaleDraftError if another is live by
    now. InvalidError names the path of a setting that routers would refuse.
    """
    full = canonical_settings(settings)
    policy = _locked(policy.pk)
    live = policy.live()
    if based_on is not None and (live is None or live.number != based_on):
        raise StaleDraftError(f"Revision {based_on} of {policy.name} is no longer live; look at the live one first.")
    draft = policy.draft() or PolicyRevision(policy=policy, number=_next_number(policy))
    draft.settings, draft.digest = full, settings_digest(full)
    draft.author, draft.reason = by, reason
    draft.save()
    return draft


@transaction.atomic
def discard_draft(policy: RoutingPolicy) -> None:
    """Throw the draft away; NotADraftError if there is none."""
    policy = _locked(policy.pk)
    if not policy.revisions.filter(state=RevisionState.DRAFT).delete()[0]:
        raise NotADraftError(f"Policy {policy.name} has no draft.")


@transaction.atomic
def publish_revision(
    revision_id: int,
    *,
    by: User | None = None,
    reason: str = "",
    expected_digest: str | None = None,
    plan: RolloutPlan = AT_ONCE,
) -> Rollout:
    """Freeze a draft as a revision and begin its rollout, which supersedes the policy's former one.

    NotADraftError if it is no draft (any more); StaleDraftError if ``expected_digest`` is given and the draft was
    edited since; InvalidError for stages where nothing is in force that they could be compared with, or come back to.
    GoneError for an unknown id.
    """
    policy_id = PolicyRevision.objects.filter(pk=revision_id).values_list("policy_id", flat=True).first()
    if policy_id is None:
        raise GoneError("draft")
    policy = _locked(policy_id)
    revision = policy.revisions.filter(pk=revision_id, state=RevisionState.DRAFT).first()
    if revision is None:
        raise NotADraftError(f"This revision of {policy.name} is no draft (any more): it was published or discarded.")
    if expected_digest is not None and expected_digest != revision.digest:
        raise StaleDraftError(f"The draft of {policy.name} was edited since you looked at it; look again.")
    if plan.stages and policy.live() is None:
        raise InvalidError("$.plan", "nothing of this policy is in force yet to come back to; publish it all at once")
    supersede_rollouts(policy, by=by, reason=f"Revision {revision.number} was published.")
    publish_draft(revision, reason=reason or revision.reason)
    return open_rollout(revision, plan, by=by)


@transaction.atomic
def create_first_policy(pool: Pool, settings: dict[str, Any], *, by: User | None = None) -> None:
    """Create the policy of a new pool with an active revision. The caller freezes the snapshot."""
    draft = save_draft(create_policy(pool), settings, by=by, reason="First policy of the pool")
    publish_draft(draft, reason=draft.reason)
    put_in_force(draft, recorded=False)


def _next_number(policy: RoutingPolicy) -> int:
    return int(policy.revisions.aggregate(Max("number"))["number__max"] or 0) + 1


def _locked(policy_id: int) -> RoutingPolicy:
    """One writer at a time for each policy."""
    rows = RoutingPolicy.objects.select_for_update(of=("self",), no_key=True).select_related("pool")
    return lock_row(rows, policy_id)


@transaction.atomic
def revert_policy(
    policy: RoutingPolicy, number: int, *, by: User | None = None, reason: str = "", expected_live: int | None = None
) -> Rollout:
    """Publish a new revision with the settings of an earlier one. A draft that somebody is at stays, as the next one.

    ConflictError where these settings are in force already; StaleDraftError if ``expected_live`` is given and another
    revision is live by now. PolicyRevision.DoesNotExist for a number that was never published.
    """
    policy = lock_row(
        RoutingPolicy.objects.select_for_update(of=("self",), no_key=True).select_related("pool"), policy.pk
    )
    earlier = policy.revisions.exclude(state=RevisionState.DRAFT).get(number=number)
    live, draft = policy.live(), policy.draft()
    if expected_live is not None and (live is None or live.number != expected_live):
        raise StaleDraftError(
            f"Revision {expected_live} of {policy.name} is no longer live; look at the live one first."
        )
    if live is not None and live.digest == earlier.digest:
        raise ConflictError(
            f"Policy {policy.name} runs what revision {number} says already, as revision {live.number}."
        )
    why = f"Back to revision {number}: {reason}" if reason else f"Back to revision {number}."
    copy = save_draft(policy, earlier.settings, by=by, reason=why)
    rollout = publish_revision(copy.pk, by=by, reason=why)
    if draft is not None:
        save_draft(policy, draft.settings, by=draft.author, reason=draft.reason)
    return rollout


def filter_revisions(
    rows: QuerySet[PolicyRevision], *, state: str = "", author: str = "", strategy: str = ""
) -> QuerySet[PolicyRevision]:
    """The revisions of one state, author or strategy; "" asks for any."""
    if "\0" in author + strategy:  # PostgreSQL looks for no such value
        return rows.none()
    asked = {"state": state, "author__username": author, "settings__strategy": strategy}
    return rows.filter(**{field: value for field, value in asked.items() if value})
