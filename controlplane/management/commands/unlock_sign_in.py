"""``manage.py unlock_sign_in``: lift the sign-in locks of a user."""

from argparse import ArgumentParser
from typing import Any

from django.core.management.base import BaseCommand

from controlplane.management import existing_user
from controlplane.services.access.sign_ins import unlock_sign_in


class Command(BaseCommand):
    help = "Let a user who failed to sign in too often try again at once."

    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("username")

    def handle(self, *_args: Any, **options: Any) -> None:
        count = unlock_sign_in(existing_user(options["username"]))
        self.stdout.write(f"{options['username']} may try again; locks lifted: {count}.")
