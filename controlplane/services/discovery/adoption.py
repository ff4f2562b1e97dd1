"""What looks at sources find, and noting it.

Theory of operation. A look is claimed by a conditional update, made without any database, and its answer counts only
while the claim does: a late one, or one of settings that were changed meanwhile, is dropped. An answer changes what is
known of each target (there, or missing since when) and nothing else; what follows from that is ``settling``. A look
that failed, or named nobody, changes nothing at all: a source that hiccups takes no replica away.

What is decided about the engines that sources find.
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

from controlplane.discovery import PollResult, Target
from controlplane.errors import ConflictError, NameTakenError, NotUsableError
from controlplane.models import DiscoveredReplica, DiscoveredState, EventKind, Replica, ReplicaSource, TargetCondition
from controlplane.services.checks import lock_row
from controlplane.services.events import record_event
from controlplane.services.fleet.replicas import add_replica

AT_ONCE = 16  # looks of one worker
GRACE_S = 30.0  # a claim outlasts the look's own deadline by this
_FOLLOWED = ("key", "name", "url", "condition", "labels", "state", "problem", "missing_since")


@transaction.atomic
def claim_polls() -> list[ReplicaSource]:
    """The sources that are due, the longest first, each claimed so that nobody else looks at the same time."""
    now = timezone.now()
    rows = ReplicaSource.objects.select_for_update(no_key=True, skip_locked=True)
    claimed = list(rows.filter(enabled=True, next_look_at__lte=now).order_by("next_look_at")[:AT_ONCE])
    for source in claimed:
        source.looks += 1
        source.next_look_at = now + timedelta(seconds=source.interval_s + source.deadline_s + GRACE_S)
        source.save(update_fields=["looks", "next_look_at"])
    return claimed


@transaction.atomic
def record_poll_failure(claimed: ReplicaSource, reason: str) -> None:
    """A look found out nothing; whatever is known stays. An event the first time."""
    source = _still_claimed(claimed)
    if source is not None:
        _fail(source, reason)


@transaction.atomic
def record_poll(claimed: ReplicaSource, found: PollResult) -> bool:
    """Note who is there and who is missing; whether the answer counted. An empty one is a failure."""
    source = _still_claimed(claimed)
    if source is None:
        return False
    if not found.targets:
        _fail(source, "The answer names nobody; what is known stays.")
        return False
    rows = list(source.discovered.select_for_update(of=("self",)))
    new = _merge(source, rows, found)
    source.found, source.new, source.refused = len(found.targets), len(new), list(found.rejections)
    source.vanished = sum(row.missing_since is not None for row in rows if row.state != DiscoveredState.DISMISSED)
    _succeed(source)
    if new:
        summary = f"Source {source.name} found {counted(row.key for row in new)}."
        record_event(EventKind.REPLICAS_FOUND, summary, pool=source.pool)
    return True


def counted(keys: Iterable[str], most: int = 5) -> str:
    """Names for a sentence: ``3 engines: a, b and c``, or the first five and how many there are."""
    named = list(keys)
    shown = ", ".join(named[:most]) + (f" and {len(named) - most} more" if len(named) > most else "")
    return f"{len(named)} engine{'' if len(named) == 1 else 's'}: {shown}"


def replica_name(key: str, *, apart_from: str = "") -> str:
    """The name that a target's replica gets; with ``apart_from``, one that nothing else would be called."""
    plain = re.sub(r"[^a-z0-9._-]+", "-", key.lower()).strip("._-") or "replica"
    if len(plain) <= 63 and not apart_from:
        return plain
    mark = hashlib.sha256(f"{apart_from}/{key}".encode()).hexdigest()[:8]
    return f"{plain[:54].rstrip('._-')}-{mark}"


def _merge(source: ReplicaSource, rows: Sequence[DiscoveredReplica], found: PollResult) -> list[DiscoveredReplica]:
    """Bring the rows in line with an answer; those that are new."""
    now = timezone.now()
    named = {target.key: target for target in found.targets}
    before = {row.pk: _facts(row) for row in rows}
    known = {row.key: row for row in rows} | _handed_over(rows, found)
    for key, row in known.items():
        if target := named.get(key):
            row.key, row.url, row.condition, row.labels = key, target.url, target.condition, dict(target.labels)
            row.missing_since = None
            row.name = row.name if row.replica_id else replica_name(key)
        elif row.key not in named and row.key not in found.rejected_keys:
            row.missing_since = row.missing_since or now
    for row in rows:
        if row.state == DiscoveredState.ADOPTED and row.replica_id is None:  # somebody removed it, and so it stays
            row.state, row.problem = DiscoveredState.DISMISSED, ""
    DiscoveredReplica.objects.bulk_update([row for row in rows if _facts(row) != before[row.pk]], _FOLLOWED, 200)
    source.discovered.filter(key__in=named).update(last_seen_at=now)
    fresh = [_discovered(source, target) for key, target in named.items() if key not in known]
    return DiscoveredReplica.objects.bulk_create(fresh)


def _handed_over(rows: Sequence[DiscoveredReplica], found: PollResult) -> dict[str, DiscoveredReplica]:
    """Rows by the new key of their engine's address: an address that changed hands is still one engine, one replica."""
    known, present = {row.key for row in rows}, {target.key for target in found.targets} | found.rejected_keys
    left = {row.url: row for row in rows if row.key not in present and row.state != DiscoveredState.DISMISSED}
    return {target.key: left[target.url] for target in found.targets if target.key not in known and target.url in left}


def _facts(row: DiscoveredReplica) -> list[Any]:
    return [getattr(row, name) for name in _FOLLOWED]


def _discovered(source: ReplicaSource, target: Target) -> DiscoveredReplica:
    return DiscoveredReplica(
        source=source,
        key=target.key,
        name=replica_name(target.key),
        url=target.url,
        condition=target.condition,
        labels=dict(target.labels),
    )


def _still_claimed(claimed: ReplicaSource) -> ReplicaSource | None:
    """The row, locked; None when another look or a change came in between, or the source is gone."""
    rows = ReplicaSource.objects.select_for_update(of=("self",), no_key=True).select_related("pool")
    return rows.filter(pk=claimed.pk, looks=claimed.looks, enabled=True).first()


def _fail(source: ReplicaSource, reason: str) -> None:
    if source.failing_since is None:
        source.failing_since = timezone.now()
        summary = f"Source {source.name} finds out nothing, and what it found stays: {reason}"
        record_event(EventKind.SOURCE_FAILING, summary, pool=source.pool, detail={"error": reason[:500]})
    source.error = reason[:500]
    _looked(source)


def _succeed(source: ReplicaSource) -> None:
    if source.failing_since is not None:
        since = source.failing_since.isoformat(timespec="seconds")
        summary = f"Source {source.name} answers again; it had failed since {since}."
        record_event(EventKind.SOURCE_RECOVERED, summary, pool=source.pool)
    source.failing_since, source.error, source.succeeded_at = None, "", timezone.now()
    _looked(source)


def _looked(source: ReplicaSource) -> None:
    source.looked_at = timezone.now()
    if source.next_look_at > source.looked_at:  # unless somebody asked for another one meanwhile
        source.next_look_at = source.looked_at + timedelta(seconds=source.interval_s)
    source.save()


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
    return lock_row(rows, discovered.pk)


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
