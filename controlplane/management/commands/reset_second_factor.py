"""``manage.py reset_second_factor``: for a user who lost the phone with the second factor."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.errors import ConflictError
from controlplane.management import existing_user
from controlplane.services.access.users import reset_second_factor


class Command(BaseCommand):
    help = "Let a user sign in with the password alone until they set up a second factor again."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("username")

    def handle(self, *_args: Any, **options: Any) -> None:
        try:
            reset_second_factor(existing_user(options["username"]))
        except ConflictError as error:
            raise CommandError(str(error)) from None
        self.stdout.write(f"{options['username']} signs in with the password alone.")
