"""The audit log: append-only entries in a hash chain, and the daily check of that chain.

Theory of operation. Entries are numbered without gaps and each contains the digest of the entry before it, so an entry
that is changed, deleted or inserted breaks the chain at that number. An advisory lock serializes writers from the first
entry of a transaction to its commit. An attacker who rewrites the last entries with all their digests is detected
only by comparing with a digest noted earlier: the daily check stores the newest digest, and ``verify_audit`` prints it.

After a check without a fault, entries older than ``AUDIT_RETENTION_DAYS`` are deleted, the oldest first. An entry of
that deletion, in the same transaction, has the number and the digest of the last deleted one: the chain begins there.
Whatever is missing without such an entry, or was deleted before its time, is a fault.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

from django.conf import settings
from django.contrib.auth.models import User
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, transaction
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from controlplane.models import AuditCheck, AuditEntry, Event, EventKind
from controlplane.models.audit import AUDIT_FIELDS
from controlplane.request_origin import current_origin

CHECK_INTERVAL = timedelta(hours=23, minutes=30)  # the task runs hourly, so a day without a worker is made up for
CHECK_RETENTION = timedelta(days=400)
MIN_RETENTION = timedelta(days=90)  # of entries; the database's trigger requires it too
MAX_EXPIRED = 100_000  # entries in one day
ZERO_DIGEST = "0" * 64  # previous digest of the first entry
_LOCK = 0x41554449  # "AUDI"


class BrokenChainError(Exception):
    """An entry is missing, changed or out of order; the text names it."""


@transaction.atomic
def append_entry(
    kind: str,
    summary: str,
    *,
    by: User | None = None,
    project: str = "",
    pool: str = "",
    reason: str = "",
    before: Any = None,
    after: Any = None,
) -> AuditEntry:
    """Append one entry, in the transaction of its change. ``before`` and ``after`` are JSON without secrets."""
    _lock()
    last = AuditEntry.objects.order_by("-number").values_list("number", "digest").first()
    number, previous = last or (0, ZERO_DIGEST)
    origin = current_origin()
    entry = AuditEntry(
        number=number + 1,
        at=timezone.now(),
        kind=kind,
        actor=by.get_username() if by else "",
        token=origin.token,
        address=origin.address,
        request_id=origin.request_id,
        project=project,
        pool=pool,
        summary=summary[:500],
        reason=reason[:500],
        before=_as_stored(before),
        after=_as_stored(after),
        previous=previous,
    )
    entry.digest = digest_of(entry)
    entry.save(force_insert=True)
    return entry


def _lock() -> None:
    """Wait for other writers of the log; until the end of the transaction."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", [_LOCK])


def digest_of(entry: AuditEntry) -> str:
    """SHA-256 of all fields of an entry, including the previous digest."""
    fields = {name: getattr(entry, name) for name in AUDIT_FIELDS}
    fields["at"] = entry.at.astimezone(UTC).isoformat(timespec="microseconds")
    return hashlib.sha256(json.dumps(fields, sort_keys=True, cls=DjangoJSONEncoder).encode()).hexdigest()


def verify_chain() -> tuple[int, str]:
    """(number of the newest entry, its digest); BrokenChainError names the first bad entry."""
    first = AuditEntry.objects.order_by("number").first()
    number, previous = (0, ZERO_DIGEST) if first is None or first.number == 1 else _last_expired(first)
    for entry in AuditEntry.objects.order_by("number").iterator(chunk_size=1000):
        number += 1
        if entry.number != number:
            raise BrokenChainError(f"Entry {number} is missing: entry {number - 1} is followed by {entry.number}.")
        if entry.previous != previous:
            raise BrokenChainError(f"Entry {number} does not contain the digest of the entry before it.")
        if entry.digest != digest_of(entry):
            raise BrokenChainError(f"Entry {number} was changed: {entry.summary}")
        previous = entry.digest
    return number, previous


def _last_expired(first: AuditEntry) -> tuple[int, str]:
    """(number, digest) of the entry before the first one, which expired; BrokenChainError unless it may have."""
    number = first.number - 1
    expiry = AuditEntry.objects.filter(kind=EventKind.AUDIT_EXPIRED).first()
    expired: dict[str, Any] = (expiry and expiry.after) or {}
    if expiry is None or expired.get("number") != number:
        raise BrokenChainError(f"Entry {number} is missing: no entry says that it expired.")
    before = parse_datetime(str(expired.get("before"))) or expiry.at
    # A later check that did not know all of these entries proves that some are younger. A day for clocks that differ.
    younger = AuditCheck.objects.filter(fault="", at__gte=before + timedelta(days=1), entries__lt=number)
    if expiry.at - before < MIN_RETENTION or younger.exists():
        raise BrokenChainError(f"Entries up to {number} were deleted before they expired.")
    return number, str(expired.get("digest"))


@transaction.atomic
def expire_entries(now: datetime) -> int:
    """Delete the entries before the first one that is younger than ``AUDIT_RETENTION_DAYS``; their number."""
    _lock()
    before = now - timedelta(days=settings.AUDIT_RETENTION_DAYS)
    numbers = AuditEntry.objects.order_by("number").values_list("number", flat=True)
    oldest, kept = numbers.first() or 0, numbers.filter(at__gte=before).first() or 0
    last = AuditEntry.objects.filter(number=min(kept, oldest + MAX_EXPIRED) - 1).first()
    if last is None:
        return 0
    summary = f"Entries {oldest} to {last.number} of the audit log expired: they are older than {before:%Y-%m-%d}."
    after = {"number": last.number, "digest": last.digest, "before": before.isoformat()}
    append_entry(EventKind.AUDIT_EXPIRED, summary, after=after)
    Event.objects.create(at=now, kind=EventKind.AUDIT_EXPIRED, summary=summary, detail={"after": after})
    with connection.cursor() as cursor:
        cursor.execute("select controlplane_expire_audit(%s)", [last.number])
    return last.number - oldest + 1


def check_audit_daily(now: datetime) -> AuditCheck | None:
    """Check the chain unless that was done within the last day; if it is intact, delete what expired."""
    latest = latest_audit_check()
    if latest is not None and now - latest.at < CHECK_INTERVAL:
        return None
    check = check_audit(now)
    if not check.fault:
        expire_entries(now)
    return check


@transaction.atomic
def check_audit(now: datetime) -> AuditCheck:
    """Verify the chain and store the result; a broken chain is also an event."""
    last_good = AuditCheck.objects.filter(fault="").first()
    try:
        entries, digest = verify_chain()
        fault = _compare_with(last_good)
    except BrokenChainError as error:
        entries, digest, fault = 0, ZERO_DIGEST, str(error)
    if fault:  # not record_event: nothing is appended to a broken log
        summary = f"The audit log was tampered with. {fault}"[:500]
        Event.objects.create(kind=EventKind.AUDIT_BROKEN, summary=summary, detail={"fault": fault})
    AuditCheck.objects.filter(at__lt=now - CHECK_RETENTION).delete()
    return AuditCheck.objects.create(at=now, entries=entries, digest=digest, fault=fault[:500])


def latest_audit_check() -> AuditCheck | None:
    return AuditCheck.objects.first()


def _compare_with(check: AuditCheck | None) -> str:
    """Problem with the entry that was the newest at an earlier check; "" if it is unchanged."""
    if check is None or check.entries == 0:
        return ""
    digest = AuditEntry.objects.filter(number=check.entries).values_list("digest", flat=True).first()
    if digest is None:
        return f"Entry {check.entries} is missing: it was the newest entry on {check.at:%Y-%m-%d}."
    return "" if digest == check.digest else f"Entries up to {check.entries} were rewritten with new digests."


def _as_stored(value: Any) -> Any:
    """The value as PostgreSQL returns it, so that its digest does not change."""
    return None if value is None else json.loads(json.dumps(value, cls=DjangoJSONEncoder))
