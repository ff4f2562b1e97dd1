"""Signing in with a username and a password: guessing limits, known devices and password rules.

A signed cookie marks devices on which a user signed in before. It names the user and a digest of their password
hash, so a new password invalidates it. It grants no access: it only exempts the device from the limit on guesses at a
name from all addresses together.
"""

from __future__ import annotations

from typing import Any

from allauth.account.adapter import DefaultAccountAdapter
from allauth.core.internal.ratelimit import RateLimitUsage
from django.conf import settings
from django.contrib.auth.models import User
from django.core import signing
from django.core.exceptions import ValidationError
from django.http import HttpRequest, HttpResponse

from controlplane.accounts.sign_in_methods import (
    NEW_DEVICES,
    count_name_failure,
    failure_key,
    is_connected,
    is_recently_authenticated,
    provider_name,
    sign_in_url,
)
from controlplane.request_origin import client_address
from controlplane.services.access.sign_ins import record_lockout

_SALT = "known device"
GUESSABLE_WORDS = ("warmpath", "vllm", "router", "replica", "prefix", "cache", "admin", "password")
_MIN_OTHER_LETTERS = 8


def remember_device(response: HttpResponse, user: User) -> None:
    """Set the cookie that marks this browser as a known device of the user."""
    response.set_cookie(
        _device_cookie(),
        signing.dumps(_device_claims(user), salt=_SALT),
        max_age=settings.KNOWN_DEVICE_S,
        secure=settings.SESSION_COOKIE_SECURE,
        httponly=True,
        samesite="Lax",
    )


def is_known_device(request: HttpRequest, name: str) -> bool:
    """Whether the user of this name signed in with this browser before. At most one query."""
    try:
        claims = signing.loads(request.COOKIES.get(_device_cookie(), ""), salt=_SALT, max_age=settings.KNOWN_DEVICE_S)
    except signing.BadSignature:
        return False
    user = User.objects.filter(pk=claims[0], username__iexact=name.strip()).first()
    return user is not None and claims == _device_claims(user)


def _device_claims(user: User) -> list[object]:
    return [user.pk, user.get_session_auth_hash()[:16]]


def _device_cookie() -> str:
    return "__Host-device" if settings.SESSION_COOKIE_SECURE else "device"


_OF_WORDS = "mostly of your username, or of words that are easy to guess on this site."


class GuessableWordsValidator:
    """Rejects passwords that consist mainly of the username and of words that an attacker would try first.

    Without those words, at least eight letters must remain.
    """

    def validate(self, password: str, user: User | None = None) -> None:
        """ValidationError for a guessable password."""
        remaining = password.lower()
        name = user.get_username().lower() if user else ""
        for word in (*GUESSABLE_WORDS, *([name] if len(name) > 2 else ())):
            remaining = remaining.replace(word, "")
        if len(remaining) < len(password) and sum(map(str.isalpha, remaining)) < _MIN_OTHER_LETTERS:
            raise ValidationError(f"This password consists {_OF_WORDS}", code="password_own_words")

    def get_help_text(self) -> str:
        return f"Your password cannot consist {_OF_WORDS}"


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]  # allauth ships no types
    """Disables sign-up and limits password guessing.

    Every rejection reads the same and takes as long, whether or not the user exists: allauth hashes the password in
    both cases, and the limits count unknown names too.
    """

    error_messages = DefaultAccountAdapter.error_messages | {
        "username_password_mismatch": "The username or the password is wrong.",
        "too_many_login_attempts": (
            f"Signing in failed too often. Wait {settings.SIGN_IN_LOCK_S // 60} minutes, or ask an admin to unlock you."
        ),
    }

    def is_open_for_signup(self, request: HttpRequest) -> bool:  # noqa: ARG002 - the signature is allauth's
        return False

    def get_client_ip(self, request: HttpRequest) -> str:
        """The address that the audit log records too, so that both trust the same proxy."""
        return client_address(request)

    def pre_authenticate(self, request: HttpRequest, **credentials: Any) -> None:
        """ValidationError, before the password is checked, after too many failures."""
        name = str(credentials.get("username", ""))
        self._name_usage: RateLimitUsage | None = None
        try:
            super().pre_authenticate(request, **credentials)
        except ValidationError:
            record_lockout(name, client_address(request))
            raise
        if not is_known_device(request, name):
            self._name_usage = count_name_failure(request, name)
            if self._name_usage is None:
                record_lockout(name, NEW_DEVICES)
                raise self.validation_error("too_many_login_attempts")

    def post_login(self, request: HttpRequest, user: User, **kwargs: Any) -> HttpResponse:
        response: HttpResponse = super().post_login(request, user, **kwargs)
        remember_device(response, user)
        return response

    def get_reauthentication_methods(self, user: User) -> list[dict[str, str]]:
        """Allauth's methods, and the identity provider, which then authenticates the user again."""
        methods: list[dict[str, str]] = super().get_reauthentication_methods(user)
        if provider_name() and is_connected(user):
            url = sign_in_url(auth_params="prompt=login&max_age=0")
            methods.append({"id": "provider", "description": f"Use {provider_name()}", "url": url})
        return methods

    def is_reauthentication_required(self, *, app: str, **_: Any) -> bool:  # noqa: ARG002 - the signature is allauth's
        return not is_recently_authenticated(self.request)

    def _rollback_login_failed_rl_usage(self) -> None:
        super()._rollback_login_failed_rl_usage()
        if self._name_usage is not None:
            self._name_usage.rollback()

    def _get_login_attempts_cache_key(self, request: HttpRequest, **credentials: Any) -> str:
        return failure_key(str(credentials.get("username", "")), client_address(request))
