"""The audit log: append-only entries in a hash chain, and the daily check of that chain.

Theory of operation. Entries are numbered without gaps and each contains the digest of the entry before it, so an entry
that is changed, deleted or inserted breaks the chain at that number. An advisory lock serializes writers from the first
entry of a transaction to its commit. An attacker who rewrites the last entries with all their digests is detected
only by comparing with a digest noted earlier: the daily check stores the newest digest, and ``verify_audit`` prints it.
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime, timedelta
from typing import Any

from django.contrib.auth.models import User
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, transaction
from django.utils import timezone

from controlplane.models import AuditCheck, AuditEntry, Event, EventKind
from controlplane.models.audit import AUDIT_FIELDS
from controlplane.request_origin import current_origin

CHECK_INTERVAL = timedelta(hours=23, minutes=30)  # the task runs hourly, so a day without a worker is made up for
CHECK_RETENTION = timedelta(days=400)
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
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", [_LOCK])
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


def digest_of(entry: AuditEntry) -> str:
    """SHA-256 of all fields of an entry, including the previous digest."""
    fields = {name: getattr(entry, name) for name in AUDIT_FIELDS}
    fields["at"] = entry.at.astimezone(UTC).isoformat(timespec="microseconds")
    return hashlib.sha256(json.dumps(fields, sort_keys=True, cls=DjangoJSONEncoder).encode()).hexdigest()


def verify_chain() -> tuple[int, str]:
    """(number of entries, newest digest); BrokenChainError names the first bad entry."""
    number, previous = 0, ZERO_DIGEST
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


def check_audit_daily(now: datetime) -> AuditCheck | None:
    """Check the chain unless that was done within the last day."""
    latest = latest_audit_check()
    return check_audit(now) if latest is None or now - latest.at >= CHECK_INTERVAL else None


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
