"""A policy's history: narrowing it, and taking an earlier revision back into force."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import QuerySet

from controlplane.errors import ConflictError, StaleDraftError
from controlplane.models import PolicyRevision, RevisionState, Rollout, RoutingPolicy
from controlplane.services.holding import hold

from .lifecycle import publish_revision, save_draft


@transaction.atomic
def revert_policy(
    policy: RoutingPolicy, number: int, *, by: User | None = None, reason: str = "", expected_live: int | None = None
) -> Rollout:
    """Publish a new revision with the settings of an earlier one. A draft that somebody is at stays, as the next one.

    ConflictError where these settings are in force already; StaleDraftError if ``expected_live`` is given and another
    revision is live by now. PolicyRevision.DoesNotExist for a number that was never published.
    """
    policy = hold(RoutingPolicy.objects.select_for_update(of=("self",), no_key=True).select_related("pool"), policy.pk)
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


def narrowed(
    rows: QuerySet[PolicyRevision], *, state: str = "", author: str = "", strategy: str = ""
) -> QuerySet[PolicyRevision]:
    """The revisions of one state, author or strategy; "" asks for any."""
    if "\0" in author + strategy:  # PostgreSQL looks for no such value
        return rows.none()
    asked = {"state": state, "author__username": author, "settings__strategy": strategy}
    return rows.filter(**{field: value for field, value in asked.items() if value})
