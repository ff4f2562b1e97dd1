"""Drafts, revisions, and going live."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.db.models import Max
from django.utils import timezone

from controlplane.errors import ConflictError, NameTakenError, NotADraftError, StaleDraftError
from controlplane.models import (
    OPEN_ROLLOUTS,
    EventKind,
    PolicyRevision,
    Pool,
    RevisionState,
    Rollout,
    RolloutState,
    RoutingPolicy,
    TaskGroup,
)

from .events import record_event
from .policy_settings import canonical_settings, changes_as_json, diff_settings, settings_digest
from .snapshots import freeze_snapshot


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
    revision_id: int, *, by: User | None = None, reason: str = "", expected_digest: str | None = None
) -> Rollout:
    """Make a draft the live revision, retire the former one, number the new configuration and wake the push.

    NotADraftError if it is no draft (any more); StaleDraftError if ``expected_digest`` is given and the draft was
    edited since. PolicyRevision.DoesNotExist for an unknown id.
    """
    policy = _locked(PolicyRevision.objects.values_list("policy_id", flat=True).get(pk=revision_id))
    revision = policy.revisions.filter(pk=revision_id, state=RevisionState.DRAFT).first()
    if revision is None:
        raise NotADraftError(f"This revision of {policy.name} is no draft (any more): it was published or discarded.")
    if expected_digest is not None and expected_digest != revision.digest:
        raise StaleDraftError(f"The draft of {policy.name} was edited since you looked at it; look again.")
    before = policy.live()
    _go_live(policy, revision, reason=reason or revision.reason)
    _record_publication(policy, before, revision, by)
    snapshot = freeze_snapshot(reason=f"{revision} published", by=by)
    _open_rollouts(policy).update(state=RolloutState.SUPERSEDED, finished_at=timezone.now())
    return Rollout.objects.create(revision=revision, snapshot=snapshot, started_by=by)


def first_revision(policy: RoutingPolicy, settings: dict[str, Any], *, by: User | None = None) -> PolicyRevision:
    """The live revision that a pool is born with. Its snapshot is the caller's to freeze."""
    draft = save_draft(policy, settings, by=by, reason="the pool's first policy")
    _go_live(policy, draft, reason=draft.reason)
    return draft


def _go_live(policy: RoutingPolicy, draft: PolicyRevision, *, reason: str) -> None:
    """Retire the live revision and put the draft in its place; the policy's row is locked."""
    policy.revisions.filter(state=RevisionState.LIVE).update(state=RevisionState.RETIRED)
    published = {"state": RevisionState.LIVE, "published_at": timezone.now(), "reason": reason[:500]}
    policy.revisions.filter(pk=draft.pk, state=RevisionState.DRAFT).update(**published)
    draft.refresh_from_db()


def _record_publication(
    policy: RoutingPolicy, before: PolicyRevision | None, after: PolicyRevision, by: User | None
) -> None:
    old = before.settings if before else None
    detail = {
        "policy": policy.name,
        "revision": after.number,
        "reason": after.reason,
        "before": old,
        "after": after.settings,
        "changes": changes_as_json(diff_settings(old, after.settings)),
    }
    summary = f"Policy {policy.name} revision {after.number} ({after.strategy}) was published."
    record_event(EventKind.POLICY_PUBLISHED, summary, pool=policy.pool, by=by, detail=detail, reason=after.reason)


def _open_rollouts(policy: RoutingPolicy) -> Any:
    return Rollout.objects.filter(revision__policy=policy, state__in=OPEN_ROLLOUTS)


def _next_number(policy: RoutingPolicy) -> int:
    return int(policy.revisions.aggregate(Max("number"))["number__max"] or 0) + 1


def _locked(policy_id: int) -> RoutingPolicy:
    """One writer at a time for each policy."""
    rows = RoutingPolicy.objects.select_for_update(of=("self",), no_key=True).select_related("pool")
    return rows.get(pk=policy_id)
