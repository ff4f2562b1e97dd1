"""``manage.py reset_second_factor``: the way back in for somebody who lost their phone."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.errors import ConflictError
from controlplane.management.people import existing_person
from controlplane.services.access.people import reset_second_factor


class Command(BaseCommand):
    """Take away one person's second factor."""

    help = "Let somebody sign in with the password alone until they set up a second factor again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Whose."""
        parser.add_argument("username")

    def handle(self, *_args: Any, **options: Any) -> None:
        """CommandError where there is no such person, or nothing to reset."""
        try:
            reset_second_factor(existing_person(options["username"]))
        except ConflictError as error:
            raise CommandError(str(error)) from None
        self.stdout.write(f"{options['username']} signs in with the password alone.")
