"""Management commands, and what they share."""

from django.contrib.auth.models import User
from django.core.management.base import CommandError

from controlplane.services.access.sign_ins import find_person


def existing_person(username: str) -> User:
    """The user of this name. CommandError for an unknown name."""
    person = find_person(username)
    if person is None:
        raise CommandError(f"There is no user {username!r}.")
    return person
