"""The second factor, as others may change it: it is taken away; only its owner sets it up."""

from __future__ import annotations

from allauth.mfa.models import Authenticator
from django.contrib.auth.models import User
from django.db import transaction

from controlplane.errors import ConflictError
from controlplane.models import EventKind
from controlplane.services.events import record_event


@transaction.atomic
def reset_second_factor(person: User, *, by: User | None = None) -> None:
    """Let somebody who lost their phone sign in with the password alone; ConflictError if there is nothing to reset."""
    if not Authenticator.objects.filter(user=person).delete()[0]:
        raise ConflictError(f"{person.username} has no second factor.")
    summary = f"The second factor of {person.username} was reset."
    record_event(EventKind.SECOND_FACTOR_CHANGED, summary, by=by)


def note_second_factor(person: User, what: str) -> None:
    """Its owner changed it."""
    record_event(EventKind.SECOND_FACTOR_CHANGED, f"{person.username} {what}.", by=person)
