"""Sessions: encrypted in the database, listed per user, ended when idle; and what signing in records.

``ControlPlaneConfig.ready`` imports this module so that the signal receivers are registered.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from allauth.account.signals import authentication_step_completed, password_changed
from allauth.account.signals import user_logged_in as allauth_logged_in
from allauth.mfa.models import Authenticator
from allauth.mfa.signals import authentication_failed, authenticator_added, authenticator_removed, authenticator_reset
from allauth.socialaccount.models import SocialLogin
from allauth.socialaccount.signals import social_account_added
from django.conf import settings
from django.contrib.auth.models import User
from django.contrib.auth.signals import user_logged_in, user_login_failed
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse

from controlplane.accounts.sign_in_methods import record_authentication, record_provider_sign_in
from controlplane.accounts.single_sign_on import authenticated_at, groups_of
from controlplane.encryption import decrypt, encrypt
from controlplane.request_origin import client_address
from controlplane.services.access.sign_ins import record_sign_in, record_sign_in_failure
from controlplane.services.access.users import (
    end_sessions,
    record_account_connected,
    record_second_factor_change,
    record_session,
    sync_group_roles,
)

ACTIVITY_INTERVAL_S = 300  # seconds between two writes of a session that is in use
_ACTIVE_AT, _STARTED_AT, _LISTED_KEY = "active_at", "started_at", "listed_as"  # keys of a session
_FACTORS = {Authenticator.Type.TOTP: "a second factor", Authenticator.Type.RECOVERY_CODES: "recovery codes"}


class EncryptedSerializer:
    """Encrypts sessions: they may hold a TOTP secret before it is confirmed."""

    def dumps(self, session: dict[str, Any]) -> bytes:
        return encrypt(json.dumps(session, separators=(",", ":")).encode("latin-1"))

    def loads(self, encrypted: bytes) -> Any:
        """Django treats a session that cannot be decrypted as empty."""
        return json.loads(decrypt(encrypted))


class SessionEndMiddleware:
    """Ends a session ``SESSION_COOKIE_AGE`` after the user's last request and ``SESSION_MAX_S`` after sign-in.

    Requests of pages that refresh themselves do not prolong a session.
    """

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        session, now = request.session, time.time()
        if not session.accessed or "_auth_user_id" not in session:
            return response
        if now - session.setdefault(_STARTED_AT, int(now)) >= settings.SESSION_MAX_S:
            session.flush()
        elif "HX-Request" not in request.headers and now - session.get(_ACTIVE_AT, 0) >= ACTIVITY_INTERVAL_S:
            record_activity(request)
        return response


def record_activity(request: HttpRequest, user: User | None = None) -> None:
    """Prolong the session, and list it for its user under its current key."""
    user = user or getattr(request, "user", None)
    if not isinstance(user, User):  # the account was disabled during the request
        return
    session = request.session
    session[_ACTIVE_AT] = int(time.time())
    if session.session_key is None:
        session.save()
    former, session[_LISTED_KEY] = session.get(_LISTED_KEY, ""), session.session_key
    agent = request.headers.get("User-Agent", "")
    record_session(user, session.session_key or "", former_key=former, address=client_address(request), agent=agent)


@receiver(user_logged_in, dispatch_uid="controlplane.signed_in")
def on_sign_in(request: HttpRequest, user: User, **_: Any) -> None:
    record_authentication(request)
    request.session[_STARTED_AT] = int(time.time())
    record_activity(request, user)
    record_sign_in(user)


@receiver(allauth_logged_in, dispatch_uid="controlplane.signed_in_by_provider")
def on_provider_sign_in(request: HttpRequest, user: User, sociallogin: SocialLogin | None = None, **_: Any) -> None:
    """After single sign-on: assign the roles of the user's groups, and store the provider's time of authentication."""
    if sociallogin is not None:
        sync_group_roles(user, groups_of(sociallogin))
        record_provider_sign_in(request)
        record_authentication(request, at=authenticated_at(sociallogin))


@receiver(social_account_added, dispatch_uid="controlplane.account_connected")
def on_account_connected(sociallogin: SocialLogin, **_: Any) -> None:
    record_account_connected(sociallogin.user)


@receiver(authentication_step_completed, dispatch_uid="controlplane.reauthenticated")
def on_authentication_step(request: HttpRequest, *, reauthenticated: bool = False, **_: Any) -> None:
    if reauthenticated:
        record_authentication(request)


@receiver(password_changed, dispatch_uid="controlplane.password_changed")
def on_password_changed(request: HttpRequest, user: User, **_: Any) -> None:
    """End all other sessions of the user; the browser that changed the password stays signed in."""
    record_activity(request)
    end_sessions(user, except_key=request.session.session_key or "", by=user)


@receiver(user_login_failed, dispatch_uid="controlplane.sign_in_failed")
def on_sign_in_failed(credentials: dict[str, Any], **_: Any) -> None:
    record_sign_in_failure(str(credentials.get("username", "")))


@receiver(authentication_failed, dispatch_uid="controlplane.code_failed")
def on_code_failed(user: User, **_: Any) -> None:
    record_sign_in_failure(user.get_username(), detail=": a wrong code")


def _record_second_factor(verb: str) -> Callable[..., None]:
    def on_change(user: User, authenticator: Authenticator, **_: Any) -> None:
        record_second_factor_change(user, f"{verb} {_FACTORS[authenticator.type]}")

    return on_change


for _signal, _verb in (
    (authenticator_added, "set up"),
    (authenticator_removed, "removed"),
    (authenticator_reset, "regenerated"),
):
    _signal.connect(_record_second_factor(_verb), weak=False, dispatch_uid=f"controlplane.second_factor: {_verb}")
