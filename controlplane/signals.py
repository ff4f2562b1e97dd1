"""What happens when people sign in, or fail to."""

from typing import Any

from allauth.account.signals import authentication_step_completed, password_changed
from allauth.account.signals import user_logged_in as came_through_allauth
from allauth.mfa.models import Authenticator
from allauth.mfa.signals import (
    authentication_failed,
    authenticator_added,
    authenticator_removed,
    authenticator_reset,
)
from allauth.socialaccount.models import SocialLogin
from allauth.socialaccount.signals import social_account_added
from django.contrib.auth.models import User
from django.contrib.auth.signals import user_logged_in, user_login_failed
from django.dispatch import receiver
from django.http import HttpRequest

from controlplane.accounts.sign_in_methods import note_proof, note_way
from controlplane.accounts.single_sign_on import authenticated_at, groups_of
from controlplane.services.access.people import (
    end_sessions,
    record_account_connected,
    record_second_factor_change,
    sync_group_roles,
)
from controlplane.services.access.sign_ins import record_sign_in, record_sign_in_failure
from controlplane.sessions import begin_session, note_presence

NAMES = {Authenticator.Type.TOTP: "a second factor", Authenticator.Type.RECOVERY_CODES: "recovery codes"}


@receiver(user_logged_in, dispatch_uid="controlplane.signed_in")
def come_in(request: HttpRequest, user: User, **_: Any) -> None:
    """Somebody came in."""
    note_proof(request)
    begin_session(request, user)
    record_sign_in(user)


@receiver(came_through_allauth, dispatch_uid="controlplane.came_by_provider")
def come_by_provider(request: HttpRequest, user: User, sociallogin: SocialLogin | None = None, **_: Any) -> None:
    """Somebody came in by single sign-on: what their groups bring now, and how fresh the provider's word is."""
    if sociallogin is not None:
        sync_group_roles(user, groups_of(sociallogin))
        note_way(request)
        note_proof(request, at=authenticated_at(sociallogin))


@receiver(social_account_added, dispatch_uid="controlplane.connected")
def connect(sociallogin: SocialLogin, **_: Any) -> None:
    """Somebody tied their account to the provider's."""
    record_account_connected(sociallogin.user)


@receiver(authentication_step_completed, dispatch_uid="controlplane.proved")
def prove(request: HttpRequest, *, reauthenticated: bool = False, **_: Any) -> None:
    """Somebody who is in proved again who they are."""
    if reauthenticated:
        note_proof(request)


@receiver(password_changed, dispatch_uid="controlplane.password_changed")
def end_others(request: HttpRequest, user: User, **_: Any) -> None:
    """Somebody changed their own password: the browser in which they did stays signed in, and no other."""
    note_presence(request)
    end_sessions(user, except_key=request.session.session_key or "", by=user)


@receiver(user_login_failed, dispatch_uid="controlplane.sign_in_refused")
def stay_out(credentials: dict[str, Any], **_: Any) -> None:
    """A wrong name or password."""
    record_sign_in_failure(str(credentials.get("username", "")))


@receiver(authentication_failed, dispatch_uid="controlplane.code_refused")
def refuse_code(user: User, **_: Any) -> None:
    """A wrong code."""
    record_sign_in_failure(user.get_username(), detail=": a wrong code")


@receiver(authenticator_added, dispatch_uid="controlplane.factor_added")
def add_factor(user: User, authenticator: Authenticator, **_: Any) -> None:
    """Somebody set up a second factor."""
    record_second_factor_change(user, f"set up {NAMES[authenticator.type]}")


@receiver(authenticator_removed, dispatch_uid="controlplane.factor_removed")
def remove_factor(user: User, authenticator: Authenticator, **_: Any) -> None:
    """Somebody gave theirs up."""
    record_second_factor_change(user, f"removed {NAMES[authenticator.type]}")


@receiver(authenticator_reset, dispatch_uid="controlplane.factor_reset")
def reset_factor(user: User, authenticator: Authenticator, **_: Any) -> None:
    """Somebody made new recovery codes."""
    record_second_factor_change(user, f"made new {NAMES[authenticator.type]}")
