"""``manage.py unlock_sign_in``: let somebody who failed too often try again."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from controlplane.management.people import existing_person
from controlplane.services.access.sign_ins import unlock_sign_in


class Command(BaseCommand):
    """Lift every lock of one person."""

    help = "Let somebody who failed to sign in too often try again at once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Whom."""
        parser.add_argument("username")

    def handle(self, *_args: Any, **options: Any) -> None:
        """CommandError where there is no such person."""
        lifted = unlock_sign_in(existing_person(options["username"]))
        self.stdout.write(f"{options['username']} may try again; locks lifted: {lifted}.")
