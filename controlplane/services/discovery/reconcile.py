"""Bringing replicas in line with what their sources know.

Theory of operation. Level-triggered, after each answer that counted: what should happen follows from the rows alone, so
it does not matter which earlier step was lost, or whether two workers do this at once. Each step looks again under the
locks on its rows (the replica before what was discovered; the logs after both), and one refused undoes no other.

| what the source says of an adopted engine | what happens |
| --- | --- |
| it has another address | its replica follows, with its name and API key (unless given before the source changed) |
| it terminates | its replica drains |
| nothing, for ``drain_after_s`` | its replica drains; at most a share of the pool is on its way out at a time |
| nothing, for ``remove_after_s``, and it drained for the time between | its replica is removed |
| it is there, and ready | its replica is activated again, if the source drained it |

A pool's last active replica is never drained, and what a person did to a replica is not undone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import partial

from django.db import transaction
from django.db.models import Count, Q
from django.utils import timezone

from controlplane.errors import ControlPlaneError, GoneError, InUseError
from controlplane.models import (
    Adoption,
    DiscoveredReplica,
    DiscoveredState,
    EventKind,
    Replica,
    ReplicaSource,
    ReplicaState,
    TargetCondition,
)
from controlplane.services.discovery.adoption import adopt, counted
from controlplane.services.events import record_event
from controlplane.services.fleet.replicas import may_move, move_replica, remove_replica, set_replica_state
from controlplane.services.snapshots import single_snapshot

TOGETHER = 50  # steps in one transaction: it keeps others who change the fleet waiting
LAST_REPLICA = "The pool's last active replica is missing or terminates; it stays."
REMEMBER_DISMISSED = timedelta(days=7)  # after it was last seen


Step = tuple[DiscoveredReplica, Callable[[DiscoveredReplica], object]]


@dataclass(frozen=True, slots=True)
class Leaving:
    """Which replicas are to go, and why not all that are missing."""

    drain: list[DiscoveredReplica]
    remove: list[DiscoveredReplica]
    held: str = ""


def reconcile_source(source_id: int) -> None:
    """Do what follows from what is known of a source's targets.

    Where the source was removed meanwhile, or a replica of it, the rest is left to the next look.
    """
    with suppress(ReplicaSource.DoesNotExist, GoneError):
        _join(source_id)
        _leave(source_id)
        _forget(source_id)


def leaving(
    source: ReplicaSource, rows: Sequence[DiscoveredReplica], *, active: int, total: int, now: datetime
) -> Leaving:
    """Which of a source's replicas are to drain and to be removed now. Pure.

    ``active`` and ``total`` are of the whole pool; ``rows`` come with their replicas.
    """
    adopted = [row for row in rows if row.replica is not None]
    drain = [row for row in adopted if row.missing_since is None and _ends(row)]
    missing = sorted((row for row in adopted if row.missing_since), key=lambda row: (row.missing_since, row.key))
    due = [row for row in missing if row.drained_at is None and _for_s(row.missing_since, now) >= source.drain_after_s]
    on_the_way = sum(row.drained_at is not None and _is(row, drained=True) for row in missing)
    most = max(1, int(source.max_vanished_ratio * total))
    taken = due[: max(0, most - on_the_way)]
    drain, last = _all_but_last([*drain, *taken], active)
    remove = [row for row in missing if _has_drained(row, source, now)]
    held = ""
    if len(taken) < len(due):
        held = f"{len(missing)} of the pool's {total} replicas are missing; at most {most} may go at a time."
    elif last:
        held = LAST_REPLICA
    return Leaving(drain, remove, held)


def _all_but_last(drain: list[DiscoveredReplica], active: int) -> tuple[list[DiscoveredReplica], bool]:
    """Those that may drain so that one active replica stays, and whether that kept one back."""
    kept = []
    for row in drain:
        serving = not _is(row, drained=True)
        if serving and active <= 1:
            continue
        active -= serving
        kept.append(row)
    return kept, len(kept) < len(drain)


def _ends(row: DiscoveredReplica) -> bool:
    return row.condition == TargetCondition.TERMINATING and row.drained_at is None


def _has_drained(row: DiscoveredReplica, source: ReplicaSource, now: datetime) -> bool:
    """Whether a replica was missing, and drained, for long enough; one that a person activated again stays."""
    if row.drained_at is None or not _is(row, drained=True):
        return False
    drained_s = source.remove_after_s - source.drain_after_s
    return _for_s(row.missing_since, now) >= source.remove_after_s and _for_s(row.drained_at, now) >= drained_s


def _is(row: DiscoveredReplica, *, drained: bool) -> bool:
    return row.replica is not None and (row.replica.state != ReplicaState.ACTIVE) == drained


def _for_s(since: datetime | None, now: datetime) -> float:
    return (now - since).total_seconds() if since else 0.0


# --- those that are there -----------------------------------------------------------------------------------


def _join(source_id: int) -> None:
    source, rows = _known(source_id)
    there = [row for row in rows if row.missing_since is None]
    moved = list(_moving([row for row in there if row.replica and row.replica.url != row.url]))
    _gathered(source, moved, partial(_follow, moved))
    ready = [row for row in there if row.condition == TargetCondition.READY]
    steps: list[Step] = [(row, _take_back) for row in ready if row.replica and row.drained_at]
    if source.adoption == Adoption.ADOPT:
        steps += [(row, adopt) for row in ready if row.state == DiscoveredState.PROPOSED]
    _take(source, steps)


def _moving(rows: Sequence[DiscoveredReplica]) -> Iterator[DiscoveredReplica]:
    """Those that may move with their API keys; what keeps the others stands beside them."""
    for row in rows:
        if row.replica is not None and may_move(row.replica, row.url):
            yield row
        else:
            _try(row, _move)


def _follow(moved: Sequence[DiscoveredReplica]) -> None:
    """Move replicas to the addresses that their engines have now.

    An address that another one of them is leaving is free once that one has moved; where they only swap, each is
    moved aside first, within one transaction, so that no router ever learns of it.
    """
    waiting = list(moved)
    while waiting:
        ours = {row.replica_id for row in waiting}
        taken = dict(Replica.objects.filter(url__in=[row.url for row in waiting]).values_list("url", "pk"))
        ready = [row for row in waiting if taken.get(row.url) not in ours]
        if not ready:
            _swap(waiting)
            return
        for row in ready:
            _try(row, _move)
        waiting = [row for row in waiting if row not in ready]


def _move(row: DiscoveredReplica) -> None:
    if row.replica is not None:
        move_replica(row.replica, row.url)


@transaction.atomic
def _swap(rows: Sequence[DiscoveredReplica]) -> None:
    for aside in (True, False):
        for row in rows:
            if row.replica is not None:
                url = f"http://replica-{row.replica_id}.invalid:1" if aside else row.url
                move_replica(row.replica, url, aside=aside)


@transaction.atomic
def _take_back(known: DiscoveredReplica) -> None:
    """A replica whose engine is back: active again, if its source drained it."""
    row = _locked(known)
    if row is None or row.replica is None or row.drained_at is None:
        return
    back = row.drained_here and row.replica.state == ReplicaState.DRAINING
    DiscoveredReplica.objects.filter(pk=row.pk).update(drained_at=None, drained_here=False)
    if back:
        set_replica_state(row.replica, ReplicaState.ACTIVE)


# --- those that go -------------------------------------------------------------------------------------------


def _leave(source_id: int) -> None:
    source, rows = _known(source_id)
    counts = Replica.objects.filter(pool=source.pool_id).aggregate(
        total=Count("pk"), active=Count("pk", filter=Q(state=ReplicaState.ACTIVE))
    )
    plan = leaving(source, rows, active=counts["active"], total=counts["total"], now=timezone.now())
    missing = [row.key for row in plan.drain if row.missing_since]
    if missing:
        summary = f"Source {source.name} does not find {counted(missing)}. Their replicas drain."
        record_event(EventKind.REPLICAS_MISSING, summary, pool=source.pool)
    _take(source, [*((row, _drain) for row in plan.drain), *((row, _remove) for row in plan.remove)])
    _note_held(source, plan.held)


@transaction.atomic
def _drain(known: DiscoveredReplica) -> None:
    row = _locked(known)
    if row is None or row.replica is None or row.drained_at is not None:
        return
    here = row.replica.state == ReplicaState.ACTIVE
    DiscoveredReplica.objects.filter(pk=row.pk).update(drained_at=timezone.now(), drained_here=here)
    if here:
        drained = set_replica_state(row.replica, ReplicaState.DRAINING)
        if not Replica.objects.filter(pool=drained.pool_id, state=ReplicaState.ACTIVE).exists():
            raise InUseError(LAST_REPLICA)  # another source drained the other one since this one looked


@transaction.atomic
def _remove(known: DiscoveredReplica) -> None:
    """The replica, and what was known of its engine: if that ever comes back, it is new."""
    row = _locked(known)
    if row is None or row.replica is None or row.missing_since is None or row.replica.state == ReplicaState.ACTIVE:
        return
    remove_replica(row.replica)
    DiscoveredReplica.objects.filter(pk=row.pk).delete()


@transaction.atomic
def _note_held(source: ReplicaSource, held: str) -> None:
    """Say why replicas that are missing stay; an event when that begins."""
    began = ReplicaSource.objects.filter(pk=source.pk, held="").update(held=held) if held else 0
    ReplicaSource.objects.filter(pk=source.pk).exclude(held=held).update(held=held)
    if began:
        record_event(EventKind.SOURCE_HOLDING, f"Source {source.name}: {held}", pool=source.pool)


# --- shared ----------------------------------------------------------------------------------------------------


@transaction.atomic
def _forget(source_id: int) -> None:
    """Drop what is of no more use: proposals that are gone, and what was dismissed long ago. Never without bound."""
    source, rows = _known(source_id)
    now = timezone.now()
    gone = sorted(
        (row for row in rows if row.state != DiscoveredState.ADOPTED and row.missing_since),
        key=lambda row: row.last_seen_at,
        reverse=True,
    )
    proposal = timedelta(seconds=source.remove_after_s)
    lifetimes = {DiscoveredState.PROPOSED: proposal, DiscoveredState.DISMISSED: REMEMBER_DISMISSED}
    old = [row for row in gone if now - row.last_seen_at >= lifetimes[DiscoveredState(row.state)]]
    forgotten = {row.pk for row in (*old, *gone[source.max_targets :])}
    if forgotten:
        DiscoveredReplica.objects.filter(pk__in=forgotten, missing_since__isnull=False, replica=None).delete()


def _take(source: ReplicaSource, steps: Sequence[Step]) -> None:
    """Take every step, so many at a time in one configuration: routers need not see a fleet grow one by one."""
    for begin in range(0, len(steps), TOGETHER):
        some = steps[begin : begin + TOGETHER]
        _gathered(source, [row for row, _ in some], partial(_take_each, some))


def _take_each(steps: Sequence[Step]) -> None:
    for row, step in steps:
        _try(row, step)


def _gathered(source: ReplicaSource, rows: Sequence[DiscoveredReplica], work: Callable[[], object]) -> None:
    """Do some work on rows in one transaction and one configuration; where that is refused, piece by piece.

    All rows are locked before anything is changed: the logs, whose locks come after those of rows, are written in
    between.
    """
    if not rows:
        return
    try:
        with single_snapshot(reason=f"source {source.name} was followed"):
            _lock_all(rows)
            work()
    except ControlPlaneError:
        work()


def _lock_all(rows: Sequence[DiscoveredReplica]) -> None:
    replicas = Replica.objects.select_for_update(no_key=True).filter(pk__in=[row.replica_id or 0 for row in rows])
    list(replicas.order_by("pk").values_list("pk"))
    known = DiscoveredReplica.objects.select_for_update().filter(pk__in=[row.pk for row in rows])
    list(known.order_by("pk").values_list("pk"))


def _known(source_id: int) -> tuple[ReplicaSource, list[DiscoveredReplica]]:
    """A source with all its rows and their replicas."""
    source = ReplicaSource.objects.select_related("pool__project").get(pk=source_id)
    return source, list(source.discovered.select_related("replica"))


def _locked(known: DiscoveredReplica) -> DiscoveredReplica | None:
    """An adopted row, locked after its replica: in the order in which a person's removal takes them."""
    replica = Replica.objects.select_for_update(of=("self",), no_key=True).filter(pk=known.replica_id or 0).first()
    if replica is None:
        return None
    return DiscoveredReplica.objects.select_for_update(of=("self",)).filter(pk=known.pk, replica=replica).first()


def _try(row: DiscoveredReplica, step: Callable[[DiscoveredReplica], object]) -> None:
    """Take one step; a refusal is kept beside the row, for a person to see."""
    try:
        step(row)
        problem = ""
    except ControlPlaneError as error:
        problem = str(error)[:500]
    if problem != row.problem:
        DiscoveredReplica.objects.filter(pk=row.pk, state=row.state).update(problem=problem)
