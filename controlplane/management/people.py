"""What commands about people share."""

from __future__ import annotations

from django.contrib.auth.models import User
from django.core.management.base import CommandError

from controlplane.services.access.sign_ins import find_person


def existing_person(username: str) -> User:
    """Somebody by name; CommandError where there is no such person."""
    person = find_person(username)
    if person is None:
        raise CommandError(f"There is nobody called {username!r}.")
    return person
