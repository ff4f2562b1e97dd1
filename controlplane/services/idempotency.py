"""Repeating a request without repeating what it did.

Theory of operation. A request with a key takes an advisory lock in the transaction of its change, looks for an answer
that was kept under the key, and otherwise keeps its own before it commits. So an answer is kept exactly where there
was a change: whoever crashes in between leaves neither, and the lock ends with the connection. A refusal is not kept,
because it changed nothing: the same key may be tried again.

What a change would lead to, noted while it is tried in a transaction that is then rolled back.
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
from controlplane.errors import KeyReusedError, TooManyKeysError, UnfinishedError
from controlplane.models import ConfigSnapshot, Event, IdempotencyRecord

KEPT_FOR = timedelta(hours=24)
MOST_KEPT = 10_000  # of one owner within that time
MOST_FORGOTTEN = 50_000  # in one sweep; the next takes the rest
_PURPOSE = "idempotency"


@dataclass(frozen=True, slots=True)
class IdempotentRequest:
    """A request that may be repeated: whose it is, under which key, and what it says."""

    owner: str
    key: str
    said: str  # address and body, in one spelling


def find_record(asked: IdempotentRequest) -> IdempotencyRecord | None:
    """The answer that was kept, None for a key that is new. Called first in the transaction of the change.

    UnfinishedError while the first request is at work, KeyReusedError if that said something else.
    """
    if not _try_lock(asked):
        raise UnfinishedError("The first request with this Idempotency-Key is still at work; ask again in a second.")
    kept = IdempotencyRecord.objects.filter(owner=asked.owner, key=asked.key).first()
    if kept is None:
        return None
    if kept.created_at < timezone.now() - KEPT_FOR:
        kept.delete()
        return None
    if not matches_digest(_PURPOSE, asked.said, kept.fingerprint):
        raise KeyReusedError("$", "This Idempotency-Key was used for another request within the last 24 hours.")
    return kept


def save_record(asked: IdempotentRequest, *, status: int, headers: dict[str, str], body: bytes) -> None:
    """Keep what is about to be answered; TooManyKeysError where somebody's keys of a day are used up."""
    since = timezone.now() - KEPT_FOR
    if IdempotencyRecord.objects.filter(owner=asked.owner, created_at__gt=since)[:MOST_KEPT].count() >= MOST_KEPT:
        raise TooManyKeysError(f"More than {MOST_KEPT} keys were used within 24 hours; leave the key away, or wait.")
    IdempotencyRecord.objects.create(
        owner=asked.owner,
        key=asked.key,
        fingerprint=keyed_digest(_PURPOSE, asked.said),
        status=status,
        headers=headers,
        encrypted=encrypt(body),
    )


def body_of(kept: IdempotencyRecord) -> bytes:
    """The body as it was answered; DecryptionError when the key that encrypted it is gone."""
    return decrypt(kept.encrypted)


def delete_expired_records() -> int:
    """Drop what was kept for 24 hours; how many."""
    old = IdempotencyRecord.objects.filter(created_at__lt=timezone.now() - KEPT_FOR).values("pk")[:MOST_FORGOTTEN]
    return IdempotencyRecord.objects.filter(pk__in=old).delete()[0]


def _try_lock(asked: IdempotentRequest) -> bool:
    digest = hashlib.sha256(f"{asked.owner}\0{asked.key}".encode()).digest()
    number = int.from_bytes(digest[:8], "big", signed=True)
    with connection.cursor() as cursor:
        cursor.execute("select pg_try_advisory_xact_lock(%s)", [number])
        row: tuple[Any, ...] | None = cursor.fetchone()
    return bool(row and row[0])


_noted: ContextVar[list[Model] | None] = ContextVar("noted", default=None)


@contextmanager
def recorded_changes() -> Iterator[list[Model]]:
    """The events and configurations that this thread records within the block, in their order."""
    made: list[Model] = []
    token = _noted.set(made)
    try:
        yield made
    finally:
        _noted.reset(token)


@receiver(post_save, sender=Event, dispatch_uid="controlplane.noted_event")
@receiver(post_save, sender=ConfigSnapshot, dispatch_uid="controlplane.noted_configuration")
def _note(instance: Model, created: bool, **_: Any) -> None:
    made = _noted.get()
    if created and made is not None:
        made.append(instance)


def configurations(made: list[Model]) -> tuple[ConfigSnapshot | None, ConfigSnapshot] | None:
    """The configuration before the noted changes (None before the first) and after; None if there is no new one."""
    frozen = [row for row in made if isinstance(row, ConfigSnapshot)]
    if not frozen:
        return None
    earlier = ConfigSnapshot.objects.defer("encrypted").filter(number__lt=frozen[0].number)
    return earlier.order_by("-number").first(), frozen[-1]


def events(made: list[Model]) -> list[Event]:
    """The noted events."""
    return [row for row in made if isinstance(row, Event)]
