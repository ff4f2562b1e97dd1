"""``manage.py rotate_secrets``: re-encrypt secrets after a change of ``WARMPATH_SECRET_KEY``, or after its loss."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from controlplane.errors import DecryptionError
from controlplane.services.secret_rotation import discard_unreadable_secrets, rotate_secrets


class Command(BaseCommand):
    help = "Encrypt every secret in the database again, with the current WARMPATH_SECRET_KEY."

    def add_arguments(self, parser: CommandParser) -> None:
        parser.add_argument(
            "--discard-unreadable",
            action="store_true",
            help="the former key is lost: remove the secrets that it encrypted, so that they can be entered again",
        )

    def handle(self, *_args: Any, discard_unreadable: bool = False, **_options: Any) -> None:
        """CommandError where a former key is missing; secrets that were re-encrypted before stay so."""
        try:
            counts = discard_unreadable_secrets() if discard_unreadable else rotate_secrets()
        except DecryptionError as error:
            raise CommandError(str(error)) from None
        for kind, count in counts.items():
            self.stdout.write(f"{count:>6}  {kind}")
        self.stdout.write(DISCARDED if discard_unreadable else ROTATED)


ROTATED = (
    "Done. Each API token moves to the current key when it is next used. When all have been used, remove the "
    "former key from WARMPATH_SECRET_KEY_FALLBACKS."
)
DISCARDED = (
    "Done. Enter the keys of replicas, sources and Prometheus servers again, replace channels and API tokens, and "
    "reset second factors. Routers that verify configurations need the new key: manage.py config_key."
)
