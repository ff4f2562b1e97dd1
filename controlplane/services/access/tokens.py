"""What scripts sign in with."""

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
_written = re.compile(r"wp_([0-9a-f]{16})\.([A-Za-z0-9_-]{43})")
_NOBODY = "0" * 64


@transaction.atomic
def create_token(
    user: User, *, name: str, scopes: Iterable[Scope], expires_at: datetime | None = None, by: User | None = None
) -> tuple[ApiToken, str]:
    """A token that acts for ``user``, and its text, ``wp_<id>.<secret>``, which is never to be had again."""
    chosen = [scope for scope in Scope if scope in set(scopes)]
    if not chosen:
        raise InvalidError("$.scopes", "expected at least one of " + ", ".join(Scope.values))
    if expires_at is not None and expires_at <= timezone.now():
        raise InvalidError("$.expires_at", "expected a moment to come")
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
    """End a token now; ConflictError if it was revoked before."""
    if not ApiToken.objects.filter(pk=token.pk, revoked_at=None).update(revoked_at=timezone.now()):
        raise ConflictError(f"Token {token} was revoked before.")
    record_event(EventKind.TOKEN_REVOKED, f"Token {token} was revoked.", by=by)


def find_token(text: str) -> ApiToken | None:
    """The valid token that a text is, None for any other; takes as long for a wrong secret as for an unknown id."""
    match = _written.fullmatch(text)
    if match is None:
        return None
    key_id, secret = match.groups()
    token = ApiToken.objects.select_related("user").filter(key_id=key_id).first()
    matches = matches_digest(PURPOSE, secret, token.digest if token else _NOBODY)
    if token is None or not matches or not _is_valid(token):
        return None
    _bring_over(token, secret)
    return token


def active_token(token_id: int) -> ApiToken | None:
    """A token as it is now; None when it ended, by itself, by revocation or with its person."""
    token = ApiToken.objects.select_related("user").filter(pk=token_id).first()
    return token if token and _is_valid(token) else None


def record_use(token: ApiToken) -> None:
    """Remember that a token was used, at most once a minute."""
    now = timezone.now()
    unnoted = Q(last_used_at=None) | Q(last_used_at__lt=now - timedelta(minutes=1))
    if token.last_used_at is None or now - token.last_used_at >= timedelta(minutes=1):
        ApiToken.objects.filter(unnoted, pk=token.pk).update(last_used_at=now)


def _bring_over(token: ApiToken, secret: str) -> None:
    """Keep the digest under the present key from now on, so that a former one can go."""
    present = keyed_digest(PURPOSE, secret)
    if token.digest != present:
        ApiToken.objects.filter(pk=token.pk, digest=token.digest).update(digest=present)


def _is_valid(token: ApiToken) -> bool:
    is_current = token.expires_at is None or token.expires_at > timezone.now()
    return token.revoked_at is None and is_current and token.user.is_active
