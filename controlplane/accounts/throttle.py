"""How often signing in may fail.

Theory of operation. allauth counts failures in Django's cache, which is a table in PostgreSQL, so that every process
counts the same ones and an attacker gains nothing by spreading over them. Three counts: a name from one address, an
address with whatever names, and the second factor of a person. A name alone is not counted, because anybody could then
lock anybody out. Counting takes a lock for each key, so that failures side by side are all counted.
"""

from __future__ import annotations

from allauth.core import ratelimit
from django.http import HttpRequest


def key_of(name: str, address: str) -> str:
    """What failures are counted under: a name as it is looked up, and where from."""
    return f"{name.strip().casefold()}|{address}"


def forget_failures(name: str, address: str) -> None:
    """Let a name sign in from an address again."""
    _forget(key_of(name, address), address)


def forget_wrong_codes(user_id: int) -> None:
    """Let a person try their second factor again."""
    _forget(f"mfa-auth-user-{user_id}", "")  # allauth's name for it


def _forget(key: str, address: str) -> None:
    request = HttpRequest()
    request.META["REMOTE_ADDR"] = address
    ratelimit.clear(request, action="login_failed", key=key)
