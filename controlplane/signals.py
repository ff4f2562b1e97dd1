"""Signing in, noted in the audit log."""

from typing import Any

from django.contrib.auth.models import User
from django.contrib.auth.signals import user_logged_in, user_login_failed
from django.dispatch import receiver

from controlplane.services.audit import append_entry

SIGNED_IN, REFUSED = "signed_in", "sign_in_refused"


@receiver(user_logged_in, dispatch_uid="controlplane.signed_in")
def note_signing_in(user: User, **_: Any) -> None:
    """Somebody came in."""
    append_entry(SIGNED_IN, f"{user.get_username()} signed in.", by=user)


@receiver(user_login_failed, dispatch_uid="controlplane.sign_in_refused")
def note_refusal(credentials: dict[str, Any], **_: Any) -> None:
    """Somebody did not. The name is what was typed, and may be a password typed in the wrong field: only names of
    people who exist are kept.
    """
    name = str(credentials.get("username", ""))
    known = "\0" not in name and User.objects.filter(username=name).exists()
    who = f"Signing in as {name} was refused." if known else "Signing in as somebody unknown was refused."
    append_entry(REFUSED, who)
