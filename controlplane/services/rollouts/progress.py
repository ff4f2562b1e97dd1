"""How far each router has come to a rollout's present stage, for pages and REST."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from controlplane.models import ConfigSnapshot, Rollout, Router
from controlplane.services.snapshots import newest_snapshot

from .plans import read_stage
from .steering import holds


class Progress(StrEnum):
    """Where one router stands."""

    ACKNOWLEDGED = "acknowledged"
    PENDING = "pending"
    REFUSED = "refused"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class RouterProgress:
    """One router against the configuration of the present stage."""

    name: str
    progress: Progress
    on_trial: bool  # whether the stage tries the revision on it
    running: int | None  # the configuration that it runs
    reason: str  # why it does not run the stage's; "" where it does, or nothing is known


def routers_of(rollout: Rollout) -> list[RouterProgress]:
    """Every router, by name; two queries. Nothing while it awaits approval."""
    snapshot, newest = rollout.snapshot, newest_snapshot()
    if snapshot is None or newest is None:
        return []
    named = read_stage(rollout.scope).routers if rollout.scope else None
    return [_of(router, snapshot, newest.number, named) for router in Router.objects.order_by("name")]


def _of(router: Router, snapshot: ConfigSnapshot, newest: int, named: tuple[str, ...] | None) -> RouterProgress:
    progress, reason = _standing(router, snapshot, newest)
    on_trial = named is None or router.name in named
    return RouterProgress(router.name, progress, on_trial, router.running_number, reason)


def _standing(router: Router, snapshot: ConfigSnapshot, newest: int) -> tuple[Progress, str]:
    """The most telling cause first."""
    if router.lost_at is not None:
        return Progress.LOST, "Silent. It serves on with what it has, and is told as soon as it is back."
    if holds(router, snapshot, newest):
        return Progress.ACKNOWLEDGED, ""
    nack = router.last_nack or {}
    if nack.get("revision", 0) >= snapshot.number:
        return Progress.REFUSED, f"{nack['reason']} (at {nack['path']})"
    return Progress.PENDING, router.last_error
