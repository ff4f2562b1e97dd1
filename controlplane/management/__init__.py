"""Management commands, and what they share."""

from django.contrib.auth.models import User
from django.core.management.base import CommandError

from controlplane.services.access.sign_ins import find_user


def existing_user(username: str) -> User:
    """The user of this name. CommandError for an unknown name."""
    user = find_user(username)
    if user is None:
        raise CommandError(f"There is no user {username!r}.")
    return user
