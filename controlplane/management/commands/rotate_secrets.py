"""``manage.py rotate_secrets``: re-encrypt secrets after a change of ``WARMPATH_SECRET_KEY``."""

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.errors import DecryptionError
from controlplane.services.secret_rotation import rotate_secrets


class Command(BaseCommand):
    help = "Encrypt every secret in the database again, with the current WARMPATH_SECRET_KEY."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """CommandError where a former key is missing; secrets that were re-encrypted before stay so."""
        try:
            counts = rotate_secrets()
        except DecryptionError as error:
            raise CommandError(str(error)) from None
        for kind, count in counts.items():
            self.stdout.write(f"{count:>6}  {kind}")
        self.stdout.write(
            "Done. Each API token moves to the current key when it is next used. When all have been used, remove the "
            "former key from WARMPATH_SECRET_KEY_FALLBACKS."
        )
