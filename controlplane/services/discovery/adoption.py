"""Claims and records polls of replica sources; adopts the engines that they discover.

Theory of operation. A conditional update claims a poll, which then runs without the database. Its result is accepted
only while the claim is valid: a late result, or one for settings that were changed meanwhile, is dropped. A result
updates the discovered rows (present, or missing since when) and nothing else; ``reconcile`` acts on them. A poll that
failed, or reported no engine, changes nothing, so a temporary failure of a source removes no replica.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from controlplane.discovery import PollResult
from controlplane.discovery.targets import role_of
from controlplane.errors import ConflictError, NameTakenError, NotUsableError
from controlplane.models import DiscoveredReplica, DiscoveredState, EventKind, Replica, ReplicaSource, TargetCondition
from controlplane.services.checks import lock_row
from controlplane.services.events import record_event
from controlplane.services.fleet.replicas import add_replica

MAX_CONCURRENT = 16  # polls of one worker
CLAIM_GRACE_S = 30.0  # a claim ends this long after the poll's deadline
_UPDATED = ("key", "name", "url", "condition", "labels", "state", "problem", "missing_since")


# --- polls ----------------------------------------------------------------------------------------------


@transaction.atomic
def claim_polls() -> list[ReplicaSource]:
    """Claim the sources that are due, the longest overdue first."""
    now = timezone.now()
    rows = ReplicaSource.objects.select_for_update(no_key=True, skip_locked=True)
    claimed = list(rows.filter(enabled=True, next_poll_at__lte=now).order_by("next_poll_at")[:MAX_CONCURRENT])
    for source in claimed:
        source.poll_number += 1
        source.next_poll_at = now + timedelta(seconds=source.interval_s + source.deadline_s + CLAIM_GRACE_S)
        source.save(update_fields=["poll_number", "next_poll_at"])
    return claimed


@transaction.atomic
def record_poll_failure(claimed: ReplicaSource, reason: str) -> None:
    """Record a failed poll; discovered engines stay. The first failure is an event."""
    source = _lock_claimed(claimed)
    if source is not None:
        _record_failure(source, reason)


@transaction.atomic
def record_poll(claimed: ReplicaSource, result: PollResult) -> bool:
    """Record which engines are present and missing; whether the result was accepted. An empty result is a failure."""
    source = _lock_claimed(claimed)
    if source is None:
        return False
    if not result.targets:
        _record_failure(source, "The source reports no engines; those discovered earlier stay.")
        return False
    rows = list(source.discovered.select_for_update(of=("self",)))
    new = _merge(source, rows, result)
    source.found, source.new, source.rejected = len(result.targets), len(new), list(result.rejections)
    source.vanished = sum(row.missing_since is not None for row in rows if row.state != DiscoveredState.DISMISSED)
    if source.failing_since is not None:
        since = source.failing_since.isoformat(timespec="seconds")
        summary = f"Polls of source {source.name} succeed again; they failed since {since}."
        record_event(EventKind.SOURCE_RECOVERED, summary, pool=source.pool)
    source.failing_since, source.error, source.succeeded_at = None, "", timezone.now()
    _finish_poll(source)
    if new:
        summary = f"Source {source.name} found {describe_engines(row.key for row in new)}."
        record_event(EventKind.REPLICAS_FOUND, summary, pool=source.pool)
    return True


def describe_engines(keys: Iterable[str], max_names: int = 5) -> str:
    """``3 engines: a, b, c``, or the first five and how many more."""
    names = list(keys)
    more = f" and {len(names) - max_names} more" if len(names) > max_names else ""
    return f"{len(names)} engine{'' if len(names) == 1 else 's'}: {', '.join(names[:max_names])}{more}"


def _merge(source: ReplicaSource, rows: Sequence[DiscoveredReplica], result: PollResult) -> list[DiscoveredReplica]:
    """Update the rows from a result; the rows of new engines."""
    now = timezone.now()
    targets = {target.key: target for target in result.targets}
    before = {row.pk: _values(row) for row in rows}
    rows_by_key = {row.key: row for row in rows} | _rows_by_new_key(rows, result)
    for key, row in rows_by_key.items():
        if target := targets.get(key):
            row.key, row.url, row.condition, row.labels = key, target.url, target.condition, dict(target.labels)
            row.missing_since = None
            row.name = row.name if row.replica_id else _replica_name(key)
        elif row.key not in targets and row.key not in result.rejected_keys:
            row.missing_since = row.missing_since or now
    for row in rows:
        if row.state == DiscoveredState.ADOPTED and row.replica_id is None:  # a user removed the replica
            row.state, row.problem = DiscoveredState.DISMISSED, ""
    DiscoveredReplica.objects.bulk_update([row for row in rows if _values(row) != before[row.pk]], _UPDATED, 200)
    source.discovered.filter(key__in=targets).update(last_seen_at=now)
    return DiscoveredReplica.objects.bulk_create(
        DiscoveredReplica(
            source=source,
            key=key,
            name=_replica_name(key),
            url=target.url,
            condition=target.condition,
            labels=dict(target.labels),
        )
        for key, target in targets.items()
        if key not in rows_by_key
    )


def _rows_by_new_key(rows: Sequence[DiscoveredReplica], result: PollResult) -> dict[str, DiscoveredReplica]:
    """Rows by the new key of their address: another engine at the same address is the same replica."""
    known, present = {row.key for row in rows}, {target.key for target in result.targets} | result.rejected_keys
    missing = {row.url: row for row in rows if row.key not in present and row.state != DiscoveredState.DISMISSED}
    return {
        target.key: missing[target.url]
        for target in result.targets
        if target.key not in known and target.url in missing
    }


def _values(row: DiscoveredReplica) -> list[Any]:
    return [getattr(row, name) for name in _UPDATED]


def _lock_claimed(claimed: ReplicaSource) -> ReplicaSource | None:
    """The locked row; None if another poll or a change invalidated the claim, or the source was removed."""
    rows = ReplicaSource.objects.select_for_update(of=("self",), no_key=True).select_related("pool")
    return rows.filter(pk=claimed.pk, poll_number=claimed.poll_number, enabled=True).first()


def _record_failure(source: ReplicaSource, reason: str) -> None:
    if source.failing_since is None:
        source.failing_since = timezone.now()
        summary = f"Polls of source {source.name} fail; discovered engines stay: {reason}"
        record_event(EventKind.SOURCE_FAILING, summary, pool=source.pool, detail={"error": reason[:500]})
    source.error = reason[:500]
    _finish_poll(source)


def _finish_poll(source: ReplicaSource) -> None:
    source.last_poll_at = timezone.now()
    if source.next_poll_at > source.last_poll_at:  # unless a user requested another poll meanwhile
        source.next_poll_at = source.last_poll_at + timedelta(seconds=source.interval_s)
    source.save()


# --- decisions ------------------------------------------------------------------------------------------


@transaction.atomic
def adopt(discovered: DiscoveredReplica, *, name: str = "", by: User | None = None) -> Replica:
    """Make an engine a replica that follows its source; ``name`` is by default the source's name for it.

    ConflictError if it is adopted already, missing or terminating, if the source has ``max_targets`` replicas, or if
    another replica has its address; NameTakenError, InvalidError.
    """
    row = _lock(discovered)
    source = row.source
    if row.state == DiscoveredState.ADOPTED:
        raise ConflictError(f"{row.key} is adopted already.")
    if row.missing_since is not None or row.condition == TargetCondition.TERMINATING:
        raise ConflictError(f"{row.key} is missing or terminating.")
    adopted = source.discovered.filter(state=DiscoveredState.ADOPTED).exclude(replica=None).count()
    if adopted >= source.max_targets:
        raise ConflictError(f"Source {source.name} already has {adopted} replicas, the maximum (max_targets).")
    replica = add_replica(source.pool, name=name or _free_name(row), url=row.url, role=role_of(row.labels), by=by)
    row.state, row.replica, row.name, row.problem = DiscoveredState.ADOPTED, replica, replica.name, ""
    row.drained_at, row.drained_here = None, False
    row.save()
    summary = f"Replica {replica.name} was adopted from source {source.name} ({row.key})."
    detail = {"after": {"source": source.name, "key": row.key, "url": row.url}}
    record_event(EventKind.REPLICA_ADOPTED, summary, pool=source.pool, replica=replica, by=by, detail=detail)
    return replica


def _lock(discovered: DiscoveredReplica) -> DiscoveredReplica:
    rows = DiscoveredReplica.objects.select_for_update(of=("self",)).select_related("source__pool__project")
    return lock_row(rows, discovered.pk)


def _replica_name(key: str, *, hashed_with: str = "") -> str:
    """A valid replica name for an engine; with ``hashed_with`` it ends in a hash of both."""
    name = re.sub(r"[^a-z0-9._-]+", "-", key.lower()).strip("._-") or "replica"
    if len(name) <= 63 and not hashed_with:
        return name
    digest = hashlib.sha256(f"{hashed_with}/{key}".encode()).hexdigest()[:8]
    return f"{name[:54].rstrip('._-')}-{digest}"


def _free_name(row: DiscoveredReplica) -> str:
    """The source's name, or a unique one if another replica has it; an error if that one has the same address."""
    name = _replica_name(row.key)
    other = Replica.objects.select_related("pool").filter(name=name).first()
    if other is None:
        return name
    if other.url == row.url:
        is_own = other.pool.project_id == row.source.pool.project_id  # other projects' replicas are not named
        raise NameTakenError("replica at", row.url) if is_own else NotUsableError(row.url)
    return _replica_name(row.key, hashed_with=row.source.name)
