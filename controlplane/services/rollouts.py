"""How far a revision has come on its way to the routers."""

from __future__ import annotations

from django.db import transaction
from django.db.models import Max
from django.utils import timezone

from controlplane.models import OPEN_ROLLOUTS, ConfigSnapshot, Rollout, RolloutState, Router


@transaction.atomic
def advance_rollouts() -> None:
    """Bring every open rollout to the state that the routers' acknowledgements say.

    Complete means that every router present runs the rollout's snapshot or a later one. With no router present
    nothing is complete. Idempotent; called after each change of a router.
    """
    rollouts = list(
        Rollout.objects.select_for_update(of=("self",)).filter(state__in=OPEN_ROLLOUTS).select_related("snapshot")
    )
    if not rollouts:
        return
    newest = ConfigSnapshot.objects.aggregate(Max("number"))["number__max"]
    present = list(Router.objects.filter(lost_at=None))
    for rollout in rollouts:
        holding = sum(_holds(router, rollout.snapshot, newest) for router in present)
        _move(rollout, complete=bool(present) and holding == len(present), begun=holding > 0)


def _holds(router: Router, snapshot: ConfigSnapshot, newest: int) -> bool:
    """Whether a router runs this snapshot or a later one of ours (another database's numbers may be higher)."""
    if router.running_number is None:
        return False
    return router.runs(snapshot.number, snapshot.sha256) or snapshot.number < router.running_number <= newest


def _move(rollout: Rollout, *, complete: bool, begun: bool) -> None:
    if complete:
        rollout.state, rollout.finished_at = RolloutState.COMPLETE, timezone.now()
    elif begun:
        rollout.state = RolloutState.PROGRESSING
    else:
        return
    rollout.save()
