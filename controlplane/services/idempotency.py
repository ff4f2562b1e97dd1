"""Idempotency keys of REST requests, and the changes that a dry run records before its rollback.

Theory of operation. A request with a key takes an advisory lock in the transaction of its change, looks for a stored
response, and otherwise stores its own before the commit. So a response is stored exactly if the change was made: a
crash leaves neither, and the lock ends with the connection. A rejected request changed nothing and stores nothing: its
key may be used again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from django.db import connection
from django.db.models import Model
from django.db.models.signals import post_save
from django.dispatch import receiver
from django.utils import timezone

from controlplane.encryption import decrypt, encrypt, keyed_digest, matches_digest
from controlplane.errors import IdempotencyKeyReusedError, RequestInProgressError, TooManyIdempotencyKeysError
from controlplane.models import ConfigSnapshot, Event, IdempotencyRecord

RETENTION = timedelta(hours=24)
MAX_KEYS = 10_000  # of one owner within the retention
MAX_DELETED = 50_000  # in one run
_PURPOSE = "idempotency"


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request with an idempotency key."""

    owner: str
    key: str
    content: str  # URL and body, normalized


def find_record(request: IdempotentRequest) -> IdempotencyRecord | None:
    """The stored response; None for a new key. Called first in the transaction of the change.

    RequestInProgressError while the first request is running, IdempotencyKeyReusedError if its content was different.
    """
    if not _try_lock(request):
        raise RequestInProgressError(
            "The first request with this Idempotency-Key is still running; try again in a second."
        )
    record = IdempotencyRecord.objects.filter(owner=request.owner, key=request.key).first()
    if record is None:
        return None
    if record.created_at < timezone.now() - RETENTION:
        record.delete()
        return None
    if not matches_digest(_PURPOSE, request.content, record.fingerprint):
        raise IdempotencyKeyReusedError(
            "$", "This Idempotency-Key was used for another request within the last 24 hours."
        )
    return record


def save_record(request: IdempotentRequest, *, status: int, headers: dict[str, str], body: bytes) -> None:
    """Store a response; TooManyIdempotencyKeysError if the owner used too many keys within 24 hours."""
    recent = IdempotencyRecord.objects.filter(owner=request.owner, created_at__gt=timezone.now() - RETENTION)
    if recent[:MAX_KEYS].count() >= MAX_KEYS:
        raise TooManyIdempotencyKeysError(f"More than {MAX_KEYS} keys were used within 24 hours; send no key, or wait.")
    IdempotencyRecord.objects.create(
        owner=request.owner,
        key=request.key,
        fingerprint=keyed_digest(_PURPOSE, request.content),
        status=status,
        headers=headers,
        encrypted=encrypt(body),
    )


def body_of(record: IdempotencyRecord) -> bytes:
    """The stored body; DecryptionError if the key that encrypted it is no longer configured."""
    return decrypt(record.encrypted)


def delete_expired_records() -> int:
    """Delete records older than 24 hours; their number."""
    expired = IdempotencyRecord.objects.filter(created_at__lt=timezone.now() - RETENTION).values("pk")[:MAX_DELETED]
    return IdempotencyRecord.objects.filter(pk__in=expired).delete()[0]


def _try_lock(request: IdempotentRequest) -> bool:
    digest = hashlib.sha256(f"{request.owner}\0{request.key}".encode()).digest()
    with connection.cursor() as cursor:
        cursor.execute("select pg_try_advisory_xact_lock(%s)", [int.from_bytes(digest[:8], "big", signed=True)])
        row: tuple[Any, ...] | None = cursor.fetchone()
    return bool(row and row[0])


_recorded: ContextVar[list[Model] | None] = ContextVar("recorded", default=None)


@contextmanager
def recorded_changes() -> Iterator[list[Model]]:
    """The events and snapshots that this thread creates within the block, in order."""
    rows: list[Model] = []
    token = _recorded.set(rows)
    try:
        yield rows
    finally:
        _recorded.reset(token)


@receiver(post_save, sender=Event, dispatch_uid="controlplane.recorded_event")
@receiver(post_save, sender=ConfigSnapshot, dispatch_uid="controlplane.recorded_snapshot")
def _record(instance: Model, created: bool, **_: Any) -> None:
    rows = _recorded.get()
    if created and rows is not None:
        rows.append(instance)


def configurations(rows: list[Model]) -> tuple[ConfigSnapshot | None, ConfigSnapshot] | None:
    """The snapshots before (None: the first) and after the recorded changes; None without a new snapshot."""
    snapshots = [row for row in rows if isinstance(row, ConfigSnapshot)]
    if not snapshots:
        return None
    earlier = ConfigSnapshot.objects.defer("encrypted").filter(number__lt=snapshots[0].number)
    return earlier.order_by("-number").first(), snapshots[-1]


def events(rows: list[Model]) -> list[Event]:
    return [row for row in rows if isinstance(row, Event)]
