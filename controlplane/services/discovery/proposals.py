"""What is decided about the engines that sources find."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.db import transaction

from controlplane.errors import ConflictError, NameTakenError, NotUsableError
from controlplane.models import DiscoveredReplica, DiscoveredState, EventKind, Replica, TargetCondition
from controlplane.services.events import record_event
from controlplane.services.fleet.replicas import add_replica
from controlplane.services.holding import hold

from .looks import replica_name


@transaction.atomic
def adopt(discovered: DiscoveredReplica, *, name: str = "", by: User | None = None) -> Replica:
    """Make an engine a replica, which follows what its source says from then on.

    It is called ``name``, or what the source calls it. ConflictError when it is one already, is gone or going, or when
    another replica has its address; NameTakenError, InvalidError.
    """
    row = _locked(discovered)
    if row.state == DiscoveredState.ADOPTED:
        raise ConflictError(f"{row.key} is adopted already.")
    if row.missing_since is not None or row.condition == TargetCondition.TERMINATING:
        raise ConflictError(f"{row.key} is gone, or on its way out.")
    _check_room(row)
    replica = add_replica(row.source.pool, name=name or _free_name(row), url=row.url, by=by)
    row.state, row.replica, row.name, row.problem = DiscoveredState.ADOPTED, replica, replica.name, ""
    row.drained_at, row.drained_here = None, False
    row.save()
    summary = f"Replica {replica.name} was adopted from source {row.source.name}, which calls it {row.key}."
    detail = {"after": {"source": row.source.name, "key": row.key, "url": row.url}}
    record_event(EventKind.REPLICA_ADOPTED, summary, pool=row.source.pool, replica=replica, by=by, detail=detail)
    return replica


@transaction.atomic
def dismiss(discovered: DiscoveredReplica, *, by: User | None = None) -> DiscoveredReplica:
    """Want none of a proposal, until somebody adopts it after all; ConflictError when it is a replica."""
    row = _locked(discovered)
    if row.state == DiscoveredState.ADOPTED:
        raise ConflictError(f"{row.key} is a replica; drain or remove that instead.")
    if row.state == DiscoveredState.PROPOSED:
        row.state, row.problem = DiscoveredState.DISMISSED, ""
        row.save()
        summary = f"{row.key}, which source {row.source.name} found, was dismissed."
        detail = {"after": {"source": row.source.name, "key": row.key, "url": row.url}}
        record_event(EventKind.REPLICA_DISMISSED, summary, pool=row.source.pool, by=by, detail=detail)
    return row


def _locked(discovered: DiscoveredReplica) -> DiscoveredReplica:
    rows = DiscoveredReplica.objects.select_for_update(of=("self",)).select_related("source__pool__project")
    return hold(rows, discovered.pk)


def _check_room(row: DiscoveredReplica) -> None:
    """A source that names ever other engines fills no pool without end."""
    adopted = row.source.discovered.filter(state=DiscoveredState.ADOPTED).exclude(replica=None).count()
    if adopted >= row.source.max_targets:
        raise ConflictError(f"Source {row.source.name} has {adopted} replicas, which is its most (max_targets).")


def _free_name(row: DiscoveredReplica) -> str:
    """What the source calls it, or a name that nothing else would have; the address tells whether it is another."""
    wanted = replica_name(row.key)
    other = Replica.objects.select_related("pool").filter(name=wanted).first()
    if other is None:
        return wanted
    if other.url == row.url:
        own = other.pool.project_id == row.source.pool.project_id  # others may not be told of
        raise NameTakenError("replica at", row.url) if own else NotUsableError(row.url)
    return replica_name(row.key, apart_from=row.source.name)
