"""Brings replicas in line with the engines that their source reports.

Theory of operation. Level-triggered, after each accepted poll: the rows alone determine what should happen, so it does
not matter which earlier step was lost, or whether two workers run at once. Each step checks again with its rows locked
(the replica before the discovered row; the logs after both), and a step that fails does not undo others.

| an adopted engine | its replica |
| --- | --- |
| has another address | moves there, with its name and API key (unless the source changed after the key was entered) |
| is terminating | drains |
| is missing for ``drain_after_s`` | drains; only a share of the pool may drain for this reason at a time |
| is missing for ``remove_after_s``, and drained for the time between | is removed |
| is ready | is activated again, if the source drained it |

A pool's last active replica is never drained, unless its role is ``prefill``, and changes by users are not undone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta

from django.db import connection, transaction
from django.db.models import Count, Q
from django.utils import timezone

from controlplane.errors import ConflictError, ControlPlaneError, GoneError, InUseError
from controlplane.models import (
    Adoption,
    DiscoveredReplica,
    DiscoveredState,
    EventKind,
    Replica,
    ReplicaRole,
    ReplicaSource,
    ReplicaState,
    TargetCondition,
)
from controlplane.services.checks import unique_or
from controlplane.services.discovery.adoption import adopt, describe_engines
from controlplane.services.events import record_event
from controlplane.services.fleet.replicas import may_move, move_replica, remove_replica, set_replica_state
from controlplane.services.snapshots import single_snapshot

BATCH = 50  # steps in one transaction, which blocks other changes of the fleet
SERVES_REQUESTS = Q(state=ReplicaState.ACTIVE) & ~Q(role=ReplicaRole.PREFILL)
LAST_REPLICA = "The pool's last active replica is missing or terminating; it stays active."
DISMISSED_RETENTION = timedelta(days=7)  # since the last poll that reported the engine

Step = tuple[DiscoveredReplica, Callable[[DiscoveredReplica], object]]


@dataclass(frozen=True, slots=True)
class _Removals:
    """The replicas to drain and to remove, and why other missing replicas stay."""

    drain: list[DiscoveredReplica]
    remove: list[DiscoveredReplica]
    hold_reason: str = ""


def reconcile_source(source_id: int) -> None:
    """Apply what a source reports to its replicas.

    If the source or one of its replicas is removed meanwhile, the next poll does the rest.
    """
    with suppress(ReplicaSource.DoesNotExist, GoneError):
        _update_present(source_id)
        _remove_missing(source_id)
        _delete_obsolete(source_id)


# --- present engines ------------------------------------------------------------------------------------


def _update_present(source_id: int) -> None:
    source, rows = _load(source_id)
    present = [row for row in rows if row.missing_since is None]
    _move_replicas(source, [row for row in present if row.replica and row.replica.url != row.url])
    ready = [row for row in present if row.condition == TargetCondition.READY]
    steps: list[Step] = [(row, _reactivate) for row in ready if row.replica and row.drained_at]
    if source.adoption == Adoption.ADOPT:
        steps += [(row, adopt) for row in ready if row.state == DiscoveredState.PROPOSED]
    _run_all(source, steps)


def _move_replicas(source: ReplicaSource, rows: Sequence[DiscoveredReplica]) -> None:
    """Move replicas to the addresses that their engines have now.

    Engines may swap addresses or pass them on, so addresses need to be unique only after all have moved.
    """
    movable: list[Step] = []
    for row in rows:
        if row.replica and may_move(row.replica, row.url):
            movable.append((row, _move))
        else:
            _run([(row, _move)])  # stores the reason

    def move_together() -> None:
        with unique_or(lambda _: ConflictError("Another replica has one of the addresses.")):
            with connection.cursor() as cursor:
                cursor.execute("set constraints replica_url_unique deferred")
            _run(movable)
            with connection.cursor() as cursor:
                cursor.execute("set constraints replica_url_unique immediate")

    _in_one_snapshot(source, movable, move_together)


def _move(row: DiscoveredReplica) -> None:
    if row.replica is not None:
        move_replica(row.replica, row.url)


@transaction.atomic
def _reactivate(discovered: DiscoveredReplica) -> None:
    """Activate a replica whose engine is back, if its source drained it."""
    row = _lock(discovered)
    if row is None or row.replica is None or row.drained_at is None:
        return
    DiscoveredReplica.objects.filter(pk=row.pk).update(drained_at=None, drained_here=False)
    if row.drained_here and row.replica.state == ReplicaState.DRAINING:
        set_replica_state(row.replica, ReplicaState.ACTIVE)


# --- missing engines ------------------------------------------------------------------------------------


def _remove_missing(source_id: int) -> None:
    source, rows = _load(source_id)
    plan = _plan_removals(source, rows, timezone.now())
    missing = [row.key for row in plan.drain if row.missing_since]
    if missing:
        summary = f"Source {source.name} no longer finds {describe_engines(missing)}. Their replicas drain."
        record_event(EventKind.REPLICAS_MISSING, summary, pool=source.pool)
    _run_all(source, [*((row, _drain) for row in plan.drain), *((row, _remove) for row in plan.remove)])
    _record_hold(source, plan.hold_reason)


def _plan_removals(source: ReplicaSource, rows: Sequence[DiscoveredReplica], now: datetime) -> _Removals:
    counts = Replica.objects.filter(pool=source.pool_id).aggregate(
        total=Count("pk"), active=Count("pk", filter=SERVES_REQUESTS)
    )
    adopted = [row for row in rows if row.replica is not None]
    terminating = [
        row
        for row in adopted
        if row.missing_since is None and row.condition == TargetCondition.TERMINATING and row.drained_at is None
    ]
    missing = sorted((row for row in adopted if row.missing_since), key=lambda row: (row.missing_since, row.key))
    due = [row for row in missing if row.drained_at is None and _age_s(row.missing_since, now) >= source.drain_after_s]
    limit = max(1, int(source.max_vanished_ratio * counts["total"]))
    draining = sum(row.drained_at is not None and not _is_active(row) for row in missing)
    allowed = due[: max(0, limit - draining)]
    drain, active = list[DiscoveredReplica](), counts["active"]
    for row in (*terminating, *allowed):
        if active > 1 or not _serves_requests(row):
            drain.append(row)
            active -= _serves_requests(row)
    hold_reason = ""
    if len(allowed) < len(due):
        hold_reason = (
            f"{len(missing)} of the pool's {counts['total']} replicas are missing; at most {limit} may drain at a time."
        )
    elif len(drain) < len(terminating) + len(allowed):
        hold_reason = LAST_REPLICA
    drain_s = source.remove_after_s - source.drain_after_s
    remove = [
        row
        for row in missing
        if row.drained_at is not None
        and not _is_active(row)  # a user may have activated it again
        and _age_s(row.missing_since, now) >= source.remove_after_s
        and _age_s(row.drained_at, now) >= drain_s
    ]
    return _Removals(drain, remove, hold_reason)


def _is_active(row: DiscoveredReplica) -> bool:
    return row.replica is not None and row.replica.state == ReplicaState.ACTIVE


def _serves_requests(row: DiscoveredReplica) -> bool:
    return _is_active(row) and row.replica is not None and row.replica.role != ReplicaRole.PREFILL


def _age_s(since: datetime | None, now: datetime) -> float:
    return (now - since).total_seconds() if since else 0.0


@transaction.atomic
def _drain(discovered: DiscoveredReplica) -> None:
    row = _lock(discovered)
    if row is None or row.replica is None or row.drained_at is not None:
        return
    active = _is_active(row)
    DiscoveredReplica.objects.filter(pk=row.pk).update(drained_at=timezone.now(), drained_here=active)
    if active:
        drained = set_replica_state(row.replica, ReplicaState.DRAINING)
        is_prefill = drained.role == ReplicaRole.PREFILL
        if not is_prefill and not Replica.objects.filter(SERVES_REQUESTS, pool=drained.pool_id).exists():
            raise InUseError(LAST_REPLICA)  # another source drained the other replica meanwhile


@transaction.atomic
def _remove(discovered: DiscoveredReplica) -> None:
    """Remove a replica and its discovered row: an engine that returns is new."""
    row = _lock(discovered)
    if row is None or row.replica is None or row.missing_since is None or _is_active(row):
        return
    remove_replica(row.replica)
    DiscoveredReplica.objects.filter(pk=row.pk).delete()


@transaction.atomic
def _record_hold(source: ReplicaSource, reason: str) -> None:
    """Store why missing replicas stay; an event when that starts."""
    row = ReplicaSource.objects.filter(pk=source.pk)
    started = row.filter(hold_reason="").update(hold_reason=reason) if reason else 0
    row.exclude(hold_reason=reason).update(hold_reason=reason)
    if started:
        record_event(EventKind.SOURCE_HOLDING, f"Source {source.name}: {reason}", pool=source.pool)


@transaction.atomic
def _delete_obsolete(source_id: int) -> None:
    """Delete missing proposals and engines whose replicas users removed long ago, so that the table stays bounded."""
    source, rows = _load(source_id)
    now = timezone.now()
    missing = [row for row in rows if row.state != DiscoveredState.ADOPTED and row.missing_since]
    missing.sort(key=lambda row: row.last_seen_at, reverse=True)
    proposal = timedelta(seconds=source.remove_after_s)
    lifetimes = {DiscoveredState.PROPOSED: proposal, DiscoveredState.DISMISSED: DISMISSED_RETENTION}
    expired = [row for row in missing if now - row.last_seen_at >= lifetimes[DiscoveredState(row.state)]]
    obsolete = {row.pk for row in (*expired, *missing[source.max_targets :])}
    if obsolete:
        DiscoveredReplica.objects.filter(pk__in=obsolete, missing_since__isnull=False, replica=None).delete()


# --- running steps --------------------------------------------------------------------------------------


def _run_all(source: ReplicaSource, steps: Sequence[Step]) -> None:
    """Run steps in batches, each frozen as one snapshot, so that routers do not see a fleet grow one by one."""
    for start in range(0, len(steps), BATCH):
        _in_one_snapshot(source, steps[start : start + BATCH])


def _in_one_snapshot(
    source: ReplicaSource, steps: Sequence[Step], run_together: Callable[[], object] | None = None
) -> None:
    """Run steps in one transaction and one snapshot; if that fails, each by itself.

    ``run_together`` runs all of them where one transaction needs more than their sequence; None: the sequence.

    All rows are locked first: steps write the audit log and snapshots, whose locks come after row locks.
    """
    if not steps:
        return
    try:
        with single_snapshot(reason=f"replicas updated from source {source.name}"):
            replicas = [row.replica_id or 0 for row, _ in steps]
            locked = Replica.objects.select_for_update(no_key=True).filter(pk__in=replicas)
            list(locked.order_by("pk").values_list("pk"))
            discovered = DiscoveredReplica.objects.select_for_update().filter(pk__in=[row.pk for row, _ in steps])
            list(discovered.order_by("pk").values_list("pk"))
            run_together() if run_together else _run(steps)
    except ControlPlaneError:
        _run(steps)


def _run(steps: Sequence[Step]) -> None:
    """Run each step; an error is stored in its row, for users to see."""
    for row, step in steps:
        try:
            step(row)
            problem = ""
        except ControlPlaneError as error:
            problem = str(error)[:500]
        if problem != row.problem:
            DiscoveredReplica.objects.filter(pk=row.pk, state=row.state).update(problem=problem)


def _load(source_id: int) -> tuple[ReplicaSource, list[DiscoveredReplica]]:
    source = ReplicaSource.objects.select_related("pool__project").get(pk=source_id)
    return source, list(source.discovered.select_related("replica"))


def _lock(discovered: DiscoveredReplica) -> DiscoveredReplica | None:
    """Lock the replica of an adopted row, then the row: a removal by a user locks in the same order. None if gone."""
    replica = Replica.objects.select_for_update(of=("self",), no_key=True).filter(pk=discovered.replica_id or 0).first()
    if replica is None:
        return None
    return DiscoveredReplica.objects.select_for_update(of=("self",)).filter(pk=discovered.pk, replica=replica).first()
