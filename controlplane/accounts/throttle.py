"""How often signing in may fail.

Theory of operation. allauth counts failures in Django's cache, which is a table in PostgreSQL, so that every process
counts the same ones and an attacker gains nothing by spreading over them. Three counts: a name from one address, an
address with whatever names, and the second factor of a person. IPv6 addresses count by their /64. A fourth count, of a
name from all addresses together, bounds who guesses from many; it holds back devices that this person never signed in
with, so that an attacker locks nobody out of their own (``known_devices``). Counting takes a lock for each key, so that
failures side by side are all counted.
"""

from __future__ import annotations

from allauth.core import ratelimit
from allauth.core.internal.ratelimit import RateLimitUsage, consume
from django.http import HttpRequest

from controlplane.request_origin import neighbourhood

NEW_DEVICES = "new devices"  # in place of an address
NAME_ACTION = "login_failed_name"  # in ACCOUNT_RATE_LIMITS


def key_of(name: str, address: str) -> str:
    """What failures are counted under: a name as it is looked up, and where from."""
    return f"{name.strip().casefold()}|{neighbourhood(address)}"


def count_for_name(request: HttpRequest, name: str) -> RateLimitUsage | None:
    """Count a failure of a name, from wherever; None where there were too many. A success takes it back."""
    app = "allauth.account"
    return consume(request, app=app, action=NAME_ACTION, key=key_of(name, NEW_DEVICES))


def forget_failures(name: str, address: str) -> None:
    """Let a name sign in from an address again."""
    if address == NEW_DEVICES:
        ratelimit.clear(HttpRequest(), action=NAME_ACTION, key=key_of(name, NEW_DEVICES))
    else:
        _forget(key_of(name, address), address)


def forget_wrong_codes(user_id: int) -> None:
    """Let a person try their second factor again."""
    _forget(f"mfa-auth-user-{user_id}", "")  # allauth's name for it


def _forget(key: str, address: str) -> None:
    request = HttpRequest()
    request.META["REMOTE_ADDR"] = address
    ratelimit.clear(request, action="login_failed", key=key)
