"""Browsers that a person signed in with before: guesses at their name from elsewhere do not hold these back.

A signed cookie names the person and a digest of their password's hash, so a new password ends it. It opens nothing: who
has it may try passwords at the rate of one address even while strangers may not.
"""

from __future__ import annotations

from django.conf import settings
from django.contrib.auth.models import User
from django.core import signing
from django.http import HttpRequest, HttpResponse

_SALT = "known device"


def remember_device(response: HttpResponse, user: User) -> None:
    """Note in the browser that this person signed in with it."""
    response.set_cookie(
        _cookie_name(),
        signing.dumps(_said_of(user), salt=_SALT),
        max_age=settings.KNOWN_DEVICE_S,
        secure=settings.SESSION_COOKIE_SECURE,
        httponly=True,
        samesite="Lax",
    )


def is_known_device(request: HttpRequest, name: str) -> bool:
    """Whether whoever signs in under this name did so with this browser before. A query only where it has a cookie."""
    try:
        said = signing.loads(request.COOKIES.get(_cookie_name(), ""), salt=_SALT, max_age=settings.KNOWN_DEVICE_S)
    except signing.BadSignature:
        return False
    person = User.objects.filter(pk=said[0], username__iexact=name.strip()).first()
    return person is not None and said == _said_of(person)


def _said_of(user: User) -> list[object]:
    return [user.pk, user.get_session_auth_hash()[:16]]


def _cookie_name() -> str:
    return "__Host-device" if settings.SESSION_COOKIE_SECURE else "device"
