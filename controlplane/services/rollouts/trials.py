"""A revision's way after it was published: tried, in force, or withdrawn.

Whoever calls these holds the policy's row or that of its open rollout, so that one moves at a time, and freezes the
snapshot afterwards. The database refuses every other way (migration 0008).
"""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from controlplane.models import EventKind, PolicyRevision, RevisionState
from controlplane.services.events import record_event
from controlplane.services.policies.settings import changes_as_json, diff_settings


def publish_draft(draft: PolicyRevision, *, reason: str) -> None:
    """Freeze a draft as published, on trial for nobody yet."""
    published = {"state": RevisionState.TRIAL, "published_at": timezone.now(), "reason": reason[:500]}
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
    moved = PolicyRevision.objects.filter(pk=revision.pk, state=RevisionState.TRIAL).update(state=after)
    if not moved:
        raise AssertionError(f"{revision} is not on trial: its rollout's row was not locked")
    revision.state = after
