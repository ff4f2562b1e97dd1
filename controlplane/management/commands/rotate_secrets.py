"""``manage.py rotate_secrets``: after a change of ``WARMPATH_SECRET_KEY``."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError

from controlplane.errors import DecryptionError
from controlplane.services.secret_rotation import rotate_secrets


class Command(BaseCommand):
    """Seal everything under the present key."""

    help = "Encrypt every secret in the database anew, under the present WARMPATH_SECRET_KEY."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """CommandError where a key is missing; what was done until then stays done."""
        try:
            moved = rotate_secrets()
        except DecryptionError as error:
            raise CommandError(str(error)) from None
        for kind, count in moved.items():
            self.stdout.write(f"{count:>6}  {kind}")
        self.stdout.write("Done. Once every token was used, take the former key out of WARMPATH_SECRET_KEY_FALLBACKS.")
