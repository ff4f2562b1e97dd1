"""The dead man's switch: an address outside that hears from us while all is well, and raises the alarm when not.

Theory of operation. Beat knocks every few seconds; the row says when the next sign of life is due and is moved on by a
conditional update, so that of several workers one sends it. Nothing is sent while scraping, evaluating or delivering is
more than three intervals late: whoever listens cannot tell that from a dead server, and need not.
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

ONE = 1
SHORTEST_S, LONGEST_S = 10, 86_400


def heartbeat() -> Heartbeat | None:
    """The one there is. One query."""
    return Heartbeat.objects.filter(pk=ONE).first()


@transaction.atomic
def set_heartbeat(*, url: str, every_s: int, by: User | None = None) -> Heartbeat:
    """Give signs of life to this address, or another than before; "" keeps the one there is. InvalidError."""
    known = heartbeat()
    if not url and known is None:
        raise InvalidError("$.url", "this is needed")
    if not SHORTEST_S <= every_s <= LONGEST_S:
        raise InvalidError("$.every_s", f"expected {SHORTEST_S} to {LONGEST_S}")
    try:
        encrypted = encrypt(checked_url(url).encode()) if url or known is None else bytes(known.encrypted)
    except ValueError as error:
        raise InvalidError("$.url", str(error)) from None
    fields = {"encrypted": encrypted, "every_s": every_s, "due_at": timezone.now(), "withheld": "", "error": ""}
    found, _ = Heartbeat.objects.update_or_create(pk=ONE, defaults=fields)
    detail = {"after": {"every_s": every_s, "url": "replaced" if url else "kept"}}
    record_event(EventKind.CHANNEL_CHANGED, f"A heartbeat is sent every {every_s} s.", by=by, detail=detail)
    return found


@transaction.atomic
def create_heartbeat(*, url: str, every_s: int, by: User | None = None) -> Heartbeat:
    """The first one; ConflictError where there is one already. InvalidError."""
    if heartbeat() is not None:
        raise ConflictError("A heartbeat is sent already; change that one.")
    return set_heartbeat(url=url, every_s=every_s, by=by)


@transaction.atomic
def update_heartbeat(
    found: Heartbeat, *, url: str = "", every_s: int | None = None, by: User | None = None
) -> Heartbeat:
    """Change what is given of the one there is. InvalidError."""
    return set_heartbeat(url=url, every_s=found.every_s if every_s is None else every_s, by=by)


@transaction.atomic
def remove_heartbeat(*, by: User | None = None) -> None:
    """Give no sign of life any more. Whoever listens will take that for an end."""
    if Heartbeat.objects.filter(pk=ONE).delete()[0]:
        record_event(EventKind.CHANNEL_REMOVED, "No heartbeat is sent any more.", by=by)


def target(found: Heartbeat) -> str:
    """Where it goes, as far as that may be shown."""
    try:
        return f"{origin(decrypt(bytes(found.encrypted)).decode())}/..."
    except DecryptionError:
        return "its stored address cannot be opened with this server's keys: set it again"


def beat(now: datetime, opener: Callable[[], httpx.Client] = open_client) -> bool:
    """Send the sign of life that is due; whether one arrived. An address that does not answer raises nothing."""
    found = heartbeat()
    if found is None or not _claimed(found, now):
        return False
    if late := overdue_work(now):
        Heartbeat.objects.filter(pk=ONE).update(withheld="; ".join(late)[:300])
        return False
    try:
        with opener() as http:
            post(http, decrypt(bytes(found.encrypted)).decode(), b"{}", now=now, headers={})
    except (DeliveryError, DecryptionError) as error:
        Heartbeat.objects.filter(pk=ONE).update(failed_at=now, error=str(error)[:200], withheld="")
        return False
    Heartbeat.objects.filter(pk=ONE).update(sent_at=now, withheld="")
    return True


def _claimed(found: Heartbeat, now: datetime) -> bool:
    ours = Heartbeat.objects.filter(pk=ONE, due_at=found.due_at, due_at__lte=now)
    return bool(ours.update(due_at=now + timedelta(seconds=found.every_s)))
