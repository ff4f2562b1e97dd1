"""Browsers that a person signed in with before: guesses at their name from elsewhere do not hold these back.

A signed cookie names the person and a digest of their password's hash, so a new password ends it. It opens nothing: who
has it may try passwords at the rate of one address even while strangers may not.

Signing in with a name and a password.
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

from controlplane.accounts.sign_in_methods import is_connected, is_fresh, provider_name, sign_in_url
from controlplane.accounts.throttle import NEW_DEVICES, count_for_name, key_of
from controlplane.request_origin import client_address
from controlplane.services.access.sign_ins import record_lockout

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


OUR_WORDS = ("warmpath", "vllm", "router", "replica", "prefix", "cache", "admin", "password")
_MUST_BE_LEFT = 8  # characters


class OwnWordsValidator:
    """A password is more than the words that come to mind here, which are the first to be tried.

    Taking those and the username away, with digits and signs, has to leave something that nobody guesses.
    """

    def validate(self, password: str, user: User | None = None) -> None:
        """ValidationError for one that is little else."""
        left = password.lower()
        name = user.get_username().lower() if user else ""
        for word in (*OUR_WORDS, *([name] if len(name) > 2 else ())):
            left = left.replace(word, "")
        if len(left) < len(password) and sum(map(str.isalpha, left)) < _MUST_BE_LEFT:
            raise ValidationError(self.get_help_text(), code="password_own_words")

    def get_help_text(self) -> str:
        """What people are told."""
        return "This password is little more than your name, or words that are the first to be tried here."


class AccountAdapter(DefaultAccountAdapter):  # type: ignore[misc]  # allauth ships no types
    """Nobody signs up by themselves, and nobody guesses for long.

    Every refusal reads the same and takes as long, whether or not there is such a person: allauth hashes the password
    for nobody too, and the limits count names that nobody has as well.
    """

    error_messages = DefaultAccountAdapter.error_messages | {
        "username_password_mismatch": "The username or the password is not right.",
        "too_many_login_attempts": (
            f"Signing in failed too often. Wait {settings.SIGN_IN_LOCK_S // 60} minutes, or ask an admin to unlock you."
        ),
    }

    def is_open_for_signup(self, request: HttpRequest) -> bool:  # noqa: ARG002 - the signature is allauth's
        """Never."""
        return False

    def get_client_ip(self, request: HttpRequest) -> str:
        """The address that the audit log names too, so that both believe the same proxy."""
        return client_address(request)

    def pre_authenticate(self, request: HttpRequest, **credentials: Any) -> None:
        """Refuse, before the password is looked at, whoever failed too often; ValidationError."""
        name = str(credentials.get("username", ""))
        self._usage_of_name: RateLimitUsage | None = None
        try:
            super().pre_authenticate(request, **credentials)
        except ValidationError:
            record_lockout(name, client_address(request))
            raise
        if not is_known_device(request, name):
            self._usage_of_name = count_for_name(request, name)
            if self._usage_of_name is None:
                record_lockout(name, NEW_DEVICES)
                raise self.validation_error("too_many_login_attempts")

    def post_login(self, request: HttpRequest, user: User, **kwargs: Any) -> HttpResponse:
        """Remember the browser."""
        response: HttpResponse = super().post_login(request, user, **kwargs)
        remember_device(response, user)
        return response

    def get_reauthentication_methods(self, user: User) -> list[dict[str, str]]:
        """Password and code, for whoever has them, and the provider, which is told to ask anew."""
        ways: list[dict[str, str]] = super().get_reauthentication_methods(user)
        if provider_name() and is_connected(user):
            url = sign_in_url(auth_params="prompt=login&max_age=0")
            ways.append({"id": "provider", "description": f"Use {provider_name()}", "url": url})
        return ways

    def is_reauthentication_required(self, *, app: str, **_: Any) -> bool:  # noqa: ARG002 - the signature is allauth's
        """Whether it is too long ago that this person proved who they are."""
        return not is_fresh(self.request)

    def _rollback_login_failed_rl_usage(self) -> None:
        super()._rollback_login_failed_rl_usage()
        if self._usage_of_name is not None:
            self._usage_of_name.rollback()

    def _get_login_attempts_cache_key(self, request: HttpRequest, **credentials: Any) -> str:
        return key_of(str(credentials.get("username", "")), client_address(request))
