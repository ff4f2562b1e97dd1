"""The audit log: written with each change, in its transaction, and never again.

Theory of operation. Entries are numbered without a gap and each holds the digest of the one before, so an entry that
is altered, taken away or put in between breaks the chain at that place. An advisory lock makes writers take turns,
from a change's first entry to its commit. Altering the last entries and all their digests together would need the
whole rest of the chain to be written anew: note the newest digest somewhere else, as ``verify_audit`` prints it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from datetime import UTC
from typing import Any

from django.contrib.auth.models import User
from django.core.serializers.json import DjangoJSONEncoder
from django.db import connection, transaction
from django.utils import timezone

from controlplane.models import AuditEntry
from controlplane.models.audit import SAID
from controlplane.request_origin import present_origin

MOST_RECENT = 200
Change = tuple[Any, Any]  # what a thing was before and after it; None for what was not, or is not known
FIRST = "0" * 64  # what the first entry holds in place of a digest
_LOCK = 0x41554449  # "AUDI"


class BrokenChainError(Exception):
    """The log was tampered with; the text says where."""


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
    """Add one entry to the log, in the transaction of what it tells of. Values are JSON, and never a secret."""
    with connection.cursor() as cursor:
        cursor.execute("select pg_advisory_xact_lock(%s)", [_LOCK])
    last = AuditEntry.objects.order_by("-number").values_list("number", "digest").first()
    number, previous = last or (0, FIRST)
    origin = present_origin()
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
        before=_plain(before),
        after=_plain(after),
        previous=previous,
    )
    entry.digest = digest_of(entry)
    entry.save(force_insert=True)
    return entry


def digest_of(entry: AuditEntry) -> str:
    """SHA-256 of everything that an entry says, the digest before it included."""
    said = {name: getattr(entry, name) for name in SAID}
    said["at"] = entry.at.astimezone(UTC).isoformat(timespec="microseconds")
    return hashlib.sha256(json.dumps(said, sort_keys=True, cls=DjangoJSONEncoder).encode()).hexdigest()


def verify_chain() -> tuple[int, str]:
    """(how many entries there are, the newest digest); BrokenChainError names the first entry that is not right."""
    number, previous = 0, FIRST
    for entry in _in_order():
        number += 1
        if entry.number != number:
            raise BrokenChainError(f"Entry {number} is missing: {entry.number} follows {number - 1}.")
        if entry.previous != previous:
            raise BrokenChainError(f"Entry {number} does not follow the one before it.")
        if entry.digest != digest_of(entry):
            raise BrokenChainError(f"Entry {number} was altered: {entry.summary}")
        previous = entry.digest
    return number, previous


def recent_changes() -> list[Change]:
    """The newest changes, newest first: at most 200, in a query."""
    return list(AuditEntry.objects.order_by("-number").values_list("before", "after")[:MOST_RECENT])


def _in_order() -> Iterator[AuditEntry]:
    return AuditEntry.objects.order_by("number").iterator(chunk_size=1000)


def _plain(value: Any) -> Any:
    """The value as it comes back from the database, so that its digest stays the same."""
    return None if value is None else json.loads(json.dumps(value, cls=DjangoJSONEncoder))
