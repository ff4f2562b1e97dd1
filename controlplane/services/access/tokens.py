"""API tokens: created, revoked, and looked up by their text."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from datetime import datetime, timedelta

from django.contrib.auth.models import User
from django.db import transaction
from django.db.models import Q
from django.utils import timezone

from controlplane.encryption import keyed_digest, matches_digest
from controlplane.errors import ConflictError, InvalidError
from controlplane.models import ApiToken, EventKind, Scope
from controlplane.services.events import record_event

PURPOSE = "api token"
_SYNTAX = re.compile(r"wp_([0-9a-f]{16})\.([A-Za-z0-9_-]{43})")
_USE_INTERVAL = timedelta(minutes=1)


@transaction.atomic
def create_token(
    user: User, *, name: str, scopes: Iterable[Scope], expires_at: datetime | None = None, by: User | None = None
) -> tuple[ApiToken, str]:
    """A token that acts for ``user``, and its text, ``wp_<id>.<secret>``, which is not stored. InvalidError."""
    scopes = set(scopes)
    chosen = [scope for scope in Scope if scope in scopes]
    if not chosen:
        raise InvalidError("$.scopes", "expected at least one of " + ", ".join(Scope.values))
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidError("$.expires_at", "expected a time in the future")
    key_id, secret = secrets.token_hex(8), secrets.token_urlsafe(32)
    digest = keyed_digest(PURPOSE, secret)
    token = ApiToken.objects.create(
        user=user, name=name, key_id=key_id, digest=digest, scopes=chosen, expires_at=expires_at
    )
    summary = f"Token {token} was created for {user.get_username()}."
    record_event(EventKind.TOKEN_CREATED, summary, by=by, detail={"scopes": chosen})
    return token, f"wp_{key_id}.{secret}"


@transaction.atomic
def revoke_token(token: ApiToken, *, by: User | None = None) -> None:
    """Revoke a token now; ConflictError if it is revoked already."""
    if not ApiToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=timezone.now()):
        raise ConflictError(f"Token {token} is already revoked.")
    record_event(EventKind.TOKEN_REVOKED, f"Token {token} was revoked.", by=by)


def find_token(text: str) -> ApiToken | None:
    """The valid token with this text. Takes the same time for a wrong secret and an unknown id."""
    match = _SYNTAX.fullmatch(text)
    if match is None:
        return None
    key_id, secret = match.groups()
    token = ApiToken.objects.select_related("user").filter(key_id=key_id).first()
    matches = matches_digest(PURPOSE, secret, token.digest if token else "0" * 64)
    if token is None or not matches or not _is_valid(token):
        return None
    current = keyed_digest(PURPOSE, secret)
    if token.digest != current:  # stored with a former secret key; the update lets operators remove that key
        ApiToken.objects.filter(pk=token.pk, digest=token.digest).update(digest=current)
    return token


def record_use(token: ApiToken) -> None:
    """Record that a token was used, at most once a minute."""
    now = timezone.now()
    if token.last_used_at is None or now - token.last_used_at >= _USE_INTERVAL:
        is_due = Q(last_used_at=None) | Q(last_used_at__lt=now - _USE_INTERVAL)
        ApiToken.objects.filter(is_due, pk=token.pk).update(last_used_at=now)


def _is_valid(token: ApiToken) -> bool:
    return token.revoked_at is None and not token.is_expired and token.user.is_active
