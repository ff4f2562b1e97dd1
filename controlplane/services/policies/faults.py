"""Revisions that an alert or an analysis named: marking them, offering healthy ones, and asking before a second try.

Settings count, not numbers: a later revision with the settings of a faulty one needs the confirmation too.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

from controlplane.errors import FaultedRevisionError
from controlplane.models import PolicyRevision, RevisionFault, RevisionState, RoutingPolicy


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


def last_healthy_revision(policy: RoutingPolicy) -> PolicyRevision | None:
    """The newest former revision whose settings are neither active nor faulty. One query."""
    live, faulty = policy.revisions.filter(state=RevisionState.LIVE), policy.revisions.exclude(fault="")
    former = policy.revisions.filter(state=RevisionState.RETIRED)
    return former.exclude(digest__in=live.union(faulty).values("digest")).order_by("-number").first()


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
