"""Signing configurations on their way to routers.

Theory of operation. A document is signed when it is sent, not when it is frozen: what is signed says until when it
holds, and a control plane that is there renews that long before it ends, by sending the same number again to routers
that say how theirs stands. So a document that somebody kept is worth nothing after ``WARMPATH_CONFIG_VALID_H`` even to
a router that knows no newer number, while a router whose control plane is away serves on with what it has.
"""

from __future__ import annotations

from datetime import datetime, timedelta

from django.conf import settings
from django.db.models import Q

from controlplane import signing_keys
from controlplane.models import Router
from routing.schema import key_id, sign_document

CHECKED = ("verified", "expired", "unsigned")  # what routers that check signatures say of their own


def sign(document: bytes, now: datetime) -> bytes:
    """A snapshot's document with a signature that holds from now on."""
    private, issued_at = signing_keys.private_key(_secret()), int(now.timestamp())
    return sign_document(
        document,
        key=signing_key_id(),
        issued_at=issued_at,
        expires_at=issued_at + int(_valid().total_seconds()),
        sign=private.sign,
    )


def public_key() -> str:
    """What routers are given to check signatures with: 64 hex digits."""
    return signing_keys.public_key(_secret())


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
