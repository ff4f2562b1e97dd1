"""Sign-in methods of a user, the time of the last authentication, and limits on failed sign-ins.

Theory of operation of the limits. allauth counts failures in Django's cache, a table in PostgreSQL, so all processes
share the counts. Three counts exist: of a name from one address, of an address with any names, and of a user's second
factor. IPv6 addresses count by their /64. A fourth count, of a name from all addresses together, bounds an attacker
with many addresses. It applies only to devices on which this user never signed in (``passwords.is_known_device``),
so an attacker cannot lock users out of their own devices. Counting takes a lock for each key, so concurrent failures
are all counted.
"""

from __future__ import annotations

import time

from allauth.core import ratelimit
from allauth.core.internal.ratelimit import RateLimitUsage, consume
from allauth.mfa.adapter import DefaultMFAAdapter
from allauth.mfa.models import Authenticator
from allauth.socialaccount.models import SocialAccount
from django.conf import settings
from django.contrib.auth.models import User
from django.http import HttpRequest
from django.urls import reverse
from django.utils.http import urlencode

from controlplane.encryption import decrypt, encrypt
from controlplane.request_origin import rate_limit_network

RECENT_S = 900  # an authentication this many seconds ago counts as recent
CLOCK_SKEW_S = 60  # a provider's clock may be ahead of ours by this much
_BY_PROVIDER, _AUTHENTICATED_AT = "signed_in_by_provider", "authenticated_at"  # keys of a session

NEW_DEVICES = "new devices"  # stands for an address: all devices on which the user never signed in
NAME_ACTION = "login_failed_name"  # in ACCOUNT_RATE_LIMITS


class SecondFactorAdapter(DefaultMFAAdapter):  # type: ignore[misc]  # allauth ships no types
    """Encrypts TOTP secrets in the database, and labels the authenticator app's entry with the username."""

    def get_totp_label(self, user: User) -> str:
        return user.get_username()

    def encrypt(self, text: str) -> str:
        return encrypt(text.encode()).decode()

    def decrypt(self, encrypted_text: str) -> str:
        return decrypt(encrypted_text.encode()).decode()


def has_totp(user: User) -> bool:
    """Whether the user signs in with a time-based code besides the password. One query."""
    return bool(Authenticator.objects.filter(user=user, type=Authenticator.Type.TOTP).exists())


def provider_name() -> str:
    """The identity provider's name on our pages; "" where none is configured."""
    apps = settings.SOCIALACCOUNT_PROVIDERS.get("openid_connect", {}).get("APPS", [])
    return str(apps[0]["name"]) if apps else ""


def sign_in_url(**query: str) -> str:
    """The URL that starts a sign-in at the identity provider."""
    (app,) = settings.SOCIALACCOUNT_PROVIDERS["openid_connect"]["APPS"]
    url = reverse("openid_connect_login", kwargs={"provider_id": app["provider_id"]})
    return f"{url}?{urlencode(query)}" if query else url


def is_connected(user: User) -> bool:
    """Whether the user's account is connected to one at the identity provider. One query."""
    return bool(SocialAccount.objects.filter(user=user).exists())


def record_provider_sign_in(request: HttpRequest) -> None:
    """Mark the session as signed in by the identity provider, which decides about second factors itself."""
    request.session[_BY_PROVIDER] = True


def signed_in_by_provider(request: HttpRequest) -> bool:
    return bool(request.session.get(_BY_PROVIDER))


def record_authentication(request: HttpRequest, *, at: float | None = None) -> None:
    """Store when the user authenticated: now, or at the Unix time that the identity provider reports."""
    request.session[_AUTHENTICATED_AT] = time.time() if at is None else at


def is_recently_authenticated(request: HttpRequest) -> bool:
    """Whether the session's last authentication is at most ``RECENT_S`` seconds old."""
    return bool(-CLOCK_SKEW_S <= time.time() - request.session.get(_AUTHENTICATED_AT, 0) < RECENT_S)


def failure_key(name: str, address: str) -> str:
    """The key under which failures of a name from an address are counted."""
    return f"{name.strip().casefold()}|{rate_limit_network(address)}"


def count_name_failure(request: HttpRequest, name: str) -> RateLimitUsage | None:
    """Count a failure of a name from any address; None above the limit. A later success rolls the usage back."""
    key = failure_key(name, NEW_DEVICES)
    return consume(request, app="allauth.account", action=NAME_ACTION, key=key)


def clear_failures(name: str, address: str) -> None:
    """Unlock the sign-in of a name from an address, or from ``NEW_DEVICES``."""
    if address == NEW_DEVICES:
        ratelimit.clear(HttpRequest(), action=NAME_ACTION, key=failure_key(name, NEW_DEVICES))
    else:
        _clear(failure_key(name, address), address)


def clear_second_factor_failures(user_id: int) -> None:
    """Unlock the second factor of a user."""
    _clear(f"mfa-auth-user-{user_id}", "")  # allauth's key


def _clear(key: str, address: str) -> None:
    request = HttpRequest()
    request.META["REMOTE_ADDR"] = address
    ratelimit.clear(request, action="login_failed", key=key)
