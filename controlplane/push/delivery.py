"""Signing configurations on their way to routers.

Theory of operation. A document is signed when it is sent, not when it is frozen: what is signed says until when it
holds, and a control plane that is there renews that long before it ends, by sending the same number again to routers
that say how theirs stands. So a document that somebody kept is worth nothing after ``WARMPATH_CONFIG_VALID_H`` even to
a router that knows no newer number, while a router whose control plane is away serves on with what it has.

Bringing one router to a snapshot.
"""

from __future__ import annotations

from datetime import datetime, timedelta

import httpx
from django.conf import settings
from django.db.models import Q
from django.utils import timezone

from controlplane import encryption
from controlplane.models import ConfigSnapshot, Router
from controlplane.push.client import Ack, Nack, Running, Unreachable, push_document, read_running
from routing.schema import key_id, sign_document

CHECKED = ("verified", "expired", "unsigned")  # what routers that check signatures say of their own


def sign(document: bytes, now: datetime) -> bytes:
    """A snapshot's document with a signature that holds from now on."""
    private, issued_at = encryption.private_key(_secret()), int(now.timestamp())
    return sign_document(
        document,
        key=signing_key_id(),
        issued_at=issued_at,
        expires_at=issued_at + int(_valid().total_seconds()),
        sign=private.sign,
    )


def public_key() -> str:
    """What routers are given to check signatures with: 64 hex digits."""
    return encryption.public_key(_secret())


def signing_key_id() -> str:
    """What documents call the present key."""
    return key_id(public_key())


def wants_renewal(router: Router, now: datetime) -> bool:
    """Whether a router checks signatures, and the one that it has is not ours any more or half over."""
    if router.signature_state not in CHECKED:
        return False
    ends = router.signature_expires_at
    return router.signature_key != signing_key_id() or ends is None or ends < now + _valid() / 2


def wanting_renewal(now: datetime) -> Q:
    """The same of rows."""
    ours = Q(signature_key=signing_key_id(), signature_expires_at__gte=now + _valid() / 2)
    return Q(signature_state__in=CHECKED) & ~ours


def _valid() -> timedelta:
    return timedelta(hours=settings.CONFIG_VALID_H)


def _secret() -> str:
    return settings.CONFIG_SIGNING_KEY or settings.SECRET_KEY


def deliver(
    http: httpx.Client, router: Router, desired: ConfigSnapshot, document: bytes, token: str
) -> Ack | Nack | Unreachable:
    """Push, unless the router already runs it; touches no database, so it may run in any thread.

    A router that is only silent, and ran the right thing when last heard of, is asked first: most often that is
    still so, and the answer is its sign of life. One whose signature wants to be renewed gets the document again.
    """
    if router.runs(desired.number, desired.sha256) and not wants_renewal(router, timezone.now()):
        match read_running(http, router.admin_url, token=token):
            case Running(desired.number, desired.sha256, signature):
                return Ack(desired.number, desired.sha256, signature)
            case Unreachable() as away:
                return away
    return push_document(http, router.admin_url, document, token=token)
