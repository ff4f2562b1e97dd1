"""``manage.py config_key``: what routers check the signatures of configurations with."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand

from controlplane.push.client import public_key, signing_key_id


class Command(BaseCommand):
    """Print the public key of the key that signs."""

    help = "Print the public key that routers check configurations with, as the variable that gives it to them."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """The variable on its own line, so that a script can take it; its id beside it."""
        self.stdout.write(f"WARMPATH_ROUTER_CONFIG_KEYS={public_key()}")
        self.stderr.write(f"Its id is {signing_key_id()}.")
