"""``manage.py config_key``: the public key with which routers verify configurations."""

from typing import Any

from django.core.management.base import BaseCommand

from controlplane.push.client import public_key, signing_key_id


class Command(BaseCommand):
    help = "Print the public key that routers verify configurations with, as WARMPATH_ROUTER_CONFIG_KEYS=KEY."

    def handle(self, *_args: Any, **_options: Any) -> None:
        """The variable on standard output, so that a script can use it; the key's id on standard error."""
        self.stdout.write(f"WARMPATH_ROUTER_CONFIG_KEYS={public_key()}")
        self.stderr.write(f"Key id: {signing_key_id()}")
