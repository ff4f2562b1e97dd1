"""The heartbeat: regular requests to an external monitor, which raises an alarm when they stop (dead man's switch).

Theory of operation. A periodic task runs every few seconds. The row stores when the next heartbeat is due and is
updated conditionally, so that one of several workers sends it. No heartbeat is sent while scraping, evaluating or
delivering is more than three intervals late, so that the monitor raises its alarm as if the server were down.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta

import httpx
from django.contrib.auth.models import User
from django.db import transaction
from django.utils import timezone

from controlplane.encryption import decrypt, encrypt
from controlplane.errors import ConflictError, DecryptionError, InvalidError
from controlplane.models import EventKind
from controlplane.services.events import record_event
from telemetry.channels.base import DeliveryError, origin
from telemetry.channels.base import url as checked_url
from telemetry.channels.http_post import open_client, post
from telemetry.models import Heartbeat
from telemetry.services.self_monitoring import overdue_work

HEARTBEAT_ID = 1  # of the only row
MIN_S, MAX_S = 10, 86_400


def heartbeat() -> Heartbeat | None:
    """The heartbeat, if there is one. One query."""
    return Heartbeat.objects.filter(pk=HEARTBEAT_ID).first()


@transaction.atomic
def set_heartbeat(*, url: str, every_s: int, by: User | None = None) -> Heartbeat:
    """Create or change the heartbeat; url "" keeps the current one. InvalidError."""
    current = heartbeat()
    if not url and current is None:
        raise InvalidError("$.url", "this is required")
    if not MIN_S <= every_s <= MAX_S:
        raise InvalidError("$.every_s", f"expected {MIN_S} to {MAX_S}")
    try:
        encrypted = encrypt(checked_url(url).encode()) if url or current is None else bytes(current.encrypted)
    except ValueError as error:
        raise InvalidError("$.url", str(error)) from None
    fields = {"encrypted": encrypted, "every_s": every_s, "due_at": timezone.now(), "withheld": "", "error": ""}
    row, _ = Heartbeat.objects.update_or_create(pk=HEARTBEAT_ID, defaults=fields)
    detail = {"after": {"every_s": every_s, "url": "replaced" if url else "kept"}}
    record_event(EventKind.CHANNEL_CHANGED, f"A heartbeat is sent every {every_s} s.", by=by, detail=detail)
    return row


@transaction.atomic
def create_heartbeat(*, url: str, every_s: int, by: User | None = None) -> Heartbeat:
    """Create the heartbeat; ConflictError if there is one, InvalidError."""
    if heartbeat() is not None:
        raise ConflictError("There is a heartbeat already: change it.")
    return set_heartbeat(url=url, every_s=every_s, by=by)


@transaction.atomic
def update_heartbeat(
    current: Heartbeat, *, url: str = "", every_s: int | None = None, by: User | None = None
) -> Heartbeat:
    """Change the given values. InvalidError."""
    return set_heartbeat(url=url, every_s=current.every_s if every_s is None else every_s, by=by)


@transaction.atomic
def remove_heartbeat(*, by: User | None = None) -> None:
    """Stop sending the heartbeat; the receiver raises its alarm."""
    if Heartbeat.objects.filter(pk=HEARTBEAT_ID).delete()[0]:
        record_event(EventKind.CHANNEL_REMOVED, "The heartbeat was removed.", by=by)


def masked_url(row: Heartbeat) -> str:
    """The URL without its path."""
    try:
        return f"{origin(decrypt(bytes(row.encrypted)).decode())}/..."
    except DecryptionError:
        return "its stored URL cannot be decrypted with this server's keys: set it again"


def send_if_due(now: datetime, open_http: Callable[[], httpx.Client] = open_client) -> bool:
    """Send the heartbeat if it is due; whether it was delivered. A failed delivery raises nothing."""
    row = heartbeat()
    if row is None or not _claim(row, now):
        return False
    if late := overdue_work(now):
        Heartbeat.objects.filter(pk=HEARTBEAT_ID).update(withheld="; ".join(late)[:300])
        return False
    try:
        with open_http() as http:
            post(http, decrypt(bytes(row.encrypted)).decode(), b"{}", now=now)
    except (DeliveryError, DecryptionError) as error:
        Heartbeat.objects.filter(pk=HEARTBEAT_ID).update(failed_at=now, error=str(error)[:200], withheld="")
        return False
    Heartbeat.objects.filter(pk=HEARTBEAT_ID).update(sent_at=now, withheld="")
    return True


def _claim(row: Heartbeat, now: datetime) -> bool:
    due = Heartbeat.objects.filter(pk=HEARTBEAT_ID, due_at=row.due_at, due_at__lte=now)
    return bool(due.update(due_at=now + timedelta(seconds=row.every_s)))
