"""Recording what happened."""

from typing import Any

from django.contrib.auth.models import User
from django.utils import timezone

from controlplane.models import Event, EventKind, Pool, Replica, Router


def record_event(
    kind: EventKind,
    summary: str,
    *,
    pool: Pool | None = None,
    replica: Replica | None = None,
    router: Router | None = None,
    by: User | None = None,
    detail: dict[str, Any] | None = None,
) -> Event:
    """Record one event, in the transaction of what it tells of. ``by`` is None where the system acted by itself.

    ``detail`` holds JSON: ``before`` and ``after`` where something was changed, and never a secret.
    """
    return Event.objects.create(
        at=timezone.now(),
        kind=kind,
        summary=summary[:500],
        pool=pool,
        replica=replica,
        router=router,
        actor=by,
        detail=detail or {},
    )
